"""Pack a study into one small file without checkpoints, to continue it on another machine."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from gsa_study.jobs import jobs_of
from gsa_study.states import FAILURES, read_state
from gsa_study.study_file import Study, StudyRun
from gsa_study.times import TIMES
from gsa_train.metrics.goodput.ledger import FILE as GOODPUT
from gsa_train.run_folder.file_names import MONITOR_STOP
from gsa_train.run_folder.starts import STARTS

OF_STUDY = (FAILURES, TIMES)
OF_RUN = (
    "config.yaml", "metrics.jsonl", "summary.json", STARTS, GOODPUT, MONITOR_STOP, "selections.pt",
    "evaluations/*/results.json", "evaluations/*/table.md",
)  # fmt: skip


def pack_study(study: Study, failures: Collection[str], out: Path) -> int:
    """Write a .tar.gz with the study's folder on top. Return the number of packed runs. Only runs with all jobs
    finished or failed are packed. Other runs would need their large checkpoints, so they start again from the
    beginning."""
    runs = packed_runs(study, failures)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with tarfile.open(temporary, "w:gz") as file:
        for path in _files(study, runs):
            file.add(path, Path(study.config.name) / path.relative_to(study.folder))
    os.replace(temporary, out)
    return len(runs)


def packed_runs(study: Study, failures: Collection[str]) -> list[StudyRun]:
    unfinished = {
        job.run.name for job in jobs_of(study) if not read_state(job).finished and job.key not in failures
    }
    failed = {run.name for run in study.runs if f"{run.name} train" in failures}
    return [run for run in study.runs if run.name in failed or run.name not in unfinished]


def _files(study: Study, runs: Collection[StudyRun]) -> Iterator[Path]:
    for name in OF_STUDY:
        yield from study.folder.glob(name)
    for run in runs:
        for name in OF_RUN:
            yield from sorted(run.folder.glob(name))
        yield from sorted((study.folder / "logs").glob(f"{run.name}_*.log"))
