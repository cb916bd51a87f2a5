"""Which job a start belongs to: torchrun and Slurm start the ranks of a job again, a user starts a new job."""

from __future__ import annotations

import logging
import math
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gsa_train.files import write_atomically
from gsa_train.parallel import Parallel
from gsa_train.run.last_words import SUBMISSION as SUBMISSION
from gsa_train.run.stop_signals import job_start_time

JOB_START = "launch.txt"
"""In the run folder: which job opened it last, when (Unix seconds), and the checksum of both lines."""

logger = logging.getLogger(__name__)


def job_id() -> str:
    """The same for every start by one submission, one Slurm job or one torchrun; torchrun's may be another's, too."""
    names = (SUBMISSION, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def note_job_start(run_folder: Path) -> None:
    lines = f"{job_id()}\n{time.time()}\n"
    write_atomically(run_folder / JOB_START, f"{lines}{zlib.crc32(lines.encode()):08x}\n")


def is_restart(run_folder: Path, parallel: Parallel) -> bool:
    """Slurm or torchrun started this again, after an earlier start opened the run folder. Collective.

    Of a submission every start but the first is one; others count theirs, as a user may start two runs in one job.
    """
    by_slurm = SUBMISSION in os.environ or _restarts("SLURM") > 0
    own = (*_last_opened(run_folder), by_slurm, _restarts("TORCHELASTIC") > 0, job_start_time())
    found: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(found, own)  # a node that has just joined counts from 0
    opened_by, opened_at = found[0][:2]
    if opened_by != job_id():
        return False
    # Without --rdzv-id all jobs over several nodes are called "none": then a launcher that ran before the folder was
    # opened tells. Those of nodes that were replaced did not.
    return any(each[2] for each in found) or (
        any(each[3] for each in found) and opened_at > min(each[4] for each in found)
    )


def _restarts(launcher: str) -> int:
    return int(os.environ.get(f"{launcher}_RESTART_COUNT", "0"))


def _last_opened(run_folder: Path) -> tuple[str | None, float]:
    """By which job, and when."""
    path = run_folder / JOB_START
    if not path.is_file():
        return None, 0.0
    try:
        text = path.read_text(encoding="utf-8")
        job, *at = text.splitlines()
        opened_at = float(at[0]) if at else 0.0  # folders from before the time was noted have none
        lines, checksum = text[: -len("12345678\n")], text[-len("12345678\n") :].strip()
        if not text.endswith("\n"):
            raise ValueError("it is cut off")
        if len(at) > 1 and f"{zlib.crc32(lines.encode()):08x}" != checksum:  # early versions had none
            raise ValueError("its checksum is not that of its content")
        if not math.isfinite(opened_at):
            raise ValueError(f"{at[0]} is no time")
    except ValueError as error:  # also of a text that is empty or not UTF-8
        logger.warning(
            "%s is damaged (%s): this start counts as the first of its job, and writes it again", path, error
        )
        return None, 0.0
    return job, opened_at
