"""Read the states of a study's jobs (finished, changed, failed) from the run folders and from failures.jsonl."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_study.jobs import Job
from gsa_study.study_file import StudyRun
from gsa_train.config import ConfigError, config_from_yaml
from gsa_train.config.load import flat_fields
from gsa_train.files import append_line

FAILURES = "failures.jsonl"
"""File of the study's folder with each failure of a job and each retry."""
PLACE_FIELDS = ("run.dir", "run.kernel_cache_dir")
"""Folders that differ between places where a study starts, and do not change a run's results."""
TEXT_FIELDS = ("data.train_dir", "data.validation_dir", "data.tokenizer")
"""Paths of texts, which differ between machines. A fingerprint tells whether the text is the same."""


@dataclass(frozen=True)
class JobState:
    job: Job
    finished: bool
    changed: tuple[str, ...] = ()
    """Fields that the study has changed since the job began, `field: before -> now`."""
    lacks_checkpoint: bool = False
    """True if the unfinished job needs the finished run's checkpoint, which was removed or is on another machine."""


def read_state(job: Job) -> JobState:
    if job.kind == "train":
        return JobState(job, is_complete(job.run), tuple(changed_fields(job.run)))
    finished = job.result.is_file()
    lacks = not finished and is_complete(job.run) and newest_checkpoint(job.run.folder) == ""
    return JobState(job, finished, tuple(_changed_evaluation(job)), lacks)


def is_complete(run: StudyRun) -> bool:
    """Returns True if summary.json says that all of the run's steps are done."""
    return bool(read_json(run.folder / "summary.json").get("steps") == run.steps)


def changed_fields(run: StudyRun, apart_from: Sequence[str] = ()) -> Iterator[str]:
    """Yield the fields that differ between the config of the run's last start and the study's config."""
    path = run.folder / "config.yaml"
    if not path.is_file():
        return
    try:
        began = config_from_yaml(path.read_text(encoding="utf-8"), path)
    except (ConfigError, UnicodeDecodeError) as error:
        yield f"config.yaml cannot be read ({' '.join(str(error).split())})"
        return
    before, now = (dict(flat_fields(dataclasses.asdict(config))) for config in (began, run.config))
    for field in {**before, **now}:
        if field not in (*PLACE_FIELDS, *apart_from) and before.get(field) != now.get(field):
            yield f"{field}: {before.get(field)} -> {now.get(field)}"


def _changed_evaluation(job: Job) -> Iterator[str]:
    command = read_json(job.result).get("command")
    if not isinstance(command, str):
        return
    before = shlex.split(command)[3:]  # after --run and its folder
    now = list(job.command[job.command.index("--run") + 2 :])
    if before != now:
        yield f"evaluation {job.name}: {shlex.join(before)} -> {shlex.join(now)}"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content, or {} if the file is missing or damaged. The job's next start writes a damaged file
    again."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest_checkpoint(run_folder: Path) -> str:
    """Returns the name of the newest checkpoint, or "" without one."""
    path = run_folder / "checkpoints" / "latest"
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- failures


def note_failure(study_folder: Path, key: str, reason: str | None) -> None:
    """Append a failure of this job. With `reason=None`, the job no longer counts as failed."""
    note = {"job": key, "reason": reason, "unix_seconds": time.time()}
    append_line(study_folder / FAILURES, json.dumps(note, ensure_ascii=False))


def read_failures(study_folder: Path) -> dict[str, str]:
    """Returns job -> why it failed. A line that a kill cut off is left out."""
    failures: dict[str, str] = {}
    path = study_folder / FAILURES
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            note = parse_json(line)
        except ValueError:
            continue
        if not isinstance(note, dict) or not {"job", "reason"} <= note.keys():
            continue
        failures.pop(note["job"], None)
        if note["reason"] is not None:
            failures[note["job"]] = note["reason"]
    return failures
