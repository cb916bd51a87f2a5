"""Distinguish a restart by torchrun or Slurm from a new start by the user."""

from __future__ import annotations

import logging
import os
import time
import zlib
from pathlib import Path

from gsa_train.distributed.objects import gathered
from gsa_train.files import write_atomically
from gsa_train.reliability.last_words import SUBMISSION as SUBMISSION
from gsa_train.reliability.stop_signals import job_start_time

JOB_START = "launch.txt"
"""File of the run folder with three lines: the id of the job that opened the folder last, the time (Unix seconds), and
the checksum of the first two lines."""

logger = logging.getLogger(__name__)


def job_id() -> str:
    """Returns an id that all starts of one submission, Slurm job or torchrun share. torchrun's ids are not unique."""
    names = (SUBMISSION, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def note_job_start(run_folder: Path) -> None:
    lines = f"{job_id()}\n{time.time()}\n"
    write_atomically(run_folder / JOB_START, f"{lines}{_checksum(lines)}\n")


def is_restart(run_folder: Path) -> bool:
    """Returns True if Slurm or torchrun restarted this run after an earlier start of the job opened the run folder.
    Collective. Within a submission by submit.py, every start after the first is a restart. Otherwise the launcher's
    restart count decides, because a user may start two runs in one job."""
    by_slurm = SUBMISSION in os.environ or _restarts("SLURM") > 0
    own = (*_last_opened(run_folder), by_slurm, _restarts("TORCHELASTIC") > 0, job_start_time())
    found = gathered(own)  # ask all ranks, because the restart count of a new node starts at 0
    opened_by, opened_at = found[0][:2]
    if opened_by != job_id():
        return False
    # The id does not suffice: without --rdzv-id every multi-node job has the id "none". In a restart, at least one
    # launcher began before the folder was opened. Launchers on replacement nodes began later.
    return any(each[2] for each in found) or (
        any(each[3] for each in found) and opened_at > min(each[4] for each in found)
    )


def _restarts(launcher: str) -> int:
    return int(os.environ.get(f"{launcher}_RESTART_COUNT", "0"))


def _last_opened(run_folder: Path) -> tuple[str | None, float]:
    path = run_folder / JOB_START
    if not path.is_file():
        return None, 0.0
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        if len(lines) != 4 or lines[3]:
            raise ValueError("it does not have three whole lines")
        job, at, checksum, _ = lines
        if _checksum(f"{job}\n{at}\n") != checksum:
            raise ValueError("its checksum does not match its content")
        return job, float(at)
    except ValueError as error:  # includes UnicodeDecodeError
        logger.warning(
            "%s is damaged (%s): this start counts as the first of its job, and writes it again", path, error
        )
        return None, 0.0


def _checksum(lines: str) -> str:
    return f"{zlib.crc32(lines.encode()):08x}"
