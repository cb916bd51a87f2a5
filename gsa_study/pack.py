"""Pack a study into one small file without checkpoints, to continue it on another machine."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

from gsa_study.jobs import jobs_of
from gsa_study.states import FAILURES, is_complete, read_state
from gsa_study.study_file import Study, StudyRun
from gsa_study.times import TIMES
from gsa_train.checkpoint.files import is_complete as is_saved
from gsa_train.metrics.goodput.ledger import FILE as GOODPUT
from gsa_train.run_folder.file_names import MONITOR_STOP
from gsa_train.run_folder.starts import STARTS

OF_STUDY = (FAILURES, TIMES)
OF_RUN = (
    "config.yaml", "metrics.jsonl", "summary.json", STARTS, GOODPUT, MONITOR_STOP, "selections.pt",
    "evaluations/*/results.json", "evaluations/*/table.md",
)  # fmt: skip


def pack_study(study: Study, failures: Collection[str], out: Path) -> int:
    """Write a .tar.gz with the study's folder on top. Returns the number of packed runs. Only runs with all jobs
    finished or failed are packed. Other runs would need their large checkpoints, so they start again from the
    beginning."""
    runs = packed_runs(study, failures)
    _write(study, _files(study, runs), out, "w:gz")
    return len(runs)


def pack_weights(study: Study, failures: Collection[str], out: Path) -> list[str]:
    """Write a .tar of the checkpoints from which runs still to do begin. Returns the checkpoints' runs and steps.
    Unpack the file at the same place. The checkpoints belong to runs that `pack_study` packs, because any other run
    starts again."""
    packed = {run.name for run in packed_runs(study, failures)}
    needed = {
        str(run.source.checkpoint): run.source
        for run in study.runs
        if run.source is not None
        and not is_complete(run)
        and run.source.run.name in packed
        and is_saved(run.source.checkpoint)
    }
    files = (
        path for each in needed.values() for path in sorted(each.checkpoint.rglob("*")) if path.is_file()
    )
    _write(study, files, out, "w")  # not compressed, because floating-point numbers do not become smaller
    return [f"{each.run.name} at step {each.step}" for each in needed.values()]


def packed_runs(study: Study, failures: Collection[str]) -> list[StudyRun]:
    unfinished = {
        job.run.name for job in jobs_of(study) if not read_state(job).finished and job.key not in failures
    }
    failed = {run.name for run in study.runs if f"{run.name} train" in failures}
    return [run for run in study.runs if run.name in failed or run.name not in unfinished]


def _write(study: Study, files: Iterable[Path], out: Path, mode: Literal["w", "w:gz"]) -> None:
    """Write the files. Their names in the archive begin with the study's name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with tarfile.open(temporary, mode) as file:
        for path in files:
            file.add(path, Path(study.config.name) / path.relative_to(study.folder))
    os.replace(temporary, out)


def _files(study: Study, runs: Collection[StudyRun]) -> Iterator[Path]:
    for name in OF_STUDY:
        yield from study.folder.glob(name)
    for run in runs:
        for name in OF_RUN:
            yield from sorted(run.folder.glob(name))
        yield from sorted((study.folder / "logs").glob(f"{run.name}_*.log"))
