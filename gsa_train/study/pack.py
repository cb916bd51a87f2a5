"""A study in one small file, to go on from on another machine: what the tables are made of, without checkpoints."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from gsa_train.goodput.ledger import FILE as GOODPUT
from gsa_train.run.file_names import MONITOR_STOP
from gsa_train.run.starts import STARTS
from gsa_train.study.jobs import jobs_of
from gsa_train.study.states import FAILURES, read_state
from gsa_train.study.study_file import Study, StudyRun
from gsa_train.study.times import TIMES

OF_STUDY = (FAILURES, TIMES)
OF_RUN = (
    "config.yaml", "metrics.jsonl", "summary.json", STARTS, GOODPUT, MONITOR_STOP, "selections.pt",
    "evaluations/*/results.json", "evaluations/*/table.md",
)  # fmt: skip


def pack_study(study: Study, failures: Collection[str], out: Path) -> int:
    """Write a .tar.gz whose top folder is the study's; returns how many runs it has.

    Runs of which all is finished or has failed. What is still to do of the others needs their checkpoints, which are
    not small: they are left out, and begin anew.
    """
    unfinished = {
        job.run.name for job in jobs_of(study) if not read_state(job).finished and job.key not in failures
    }
    failed = {run.name for run in study.runs if f"{run.name} train" in failures}
    runs = [run for run in study.runs if run.name in failed or run.name not in unfinished]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with tarfile.open(temporary, "w:gz") as file:
        for path in _files(study, runs):
            file.add(path, Path(study.config.name) / path.relative_to(study.folder))
    os.replace(temporary, out)
    return len(runs)


def _files(study: Study, runs: Collection[StudyRun]) -> Iterator[Path]:
    for name in OF_STUDY:
        yield from study.folder.glob(name)
    for run in runs:
        for name in OF_RUN:
            yield from sorted(run.folder.glob(name))
        yield from sorted((study.folder / "logs").glob(f"{run.name}_*.log"))
