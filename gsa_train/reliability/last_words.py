"""Report why a process ends: on stderr, or in the summary that torchrun prints last.

torchrun's summary shows the content of TORCHELASTIC_ERROR_FILE of each rank. The format is defined by
torch.distributed.elastic.multiprocessing.errors.ErrorHandler. This module writes the file without importing torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from gsa_train.process.console import drain_console

SUBMISSION = "GSA_SUBMISSION"
"""Environment variable of launch/slurm/job.sh: folder of the submission by submit.py. The jobs of a chain share it."""


def say_last(message: str) -> None:
    """Print why this process ends: in torchrun's summary if there will be one, else on stderr."""
    if not tell_torchrun(message) or _is_started_again():
        print(message, file=sys.stderr)


def tell_torchrun(message: str) -> bool:
    """Write the message for torchrun's summary. Returns False on an error or if torchrun did not start this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    # Without `py_callstack`, torchrun prints the message itself.
    failure = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": failure}, file)
    except OSError:
        return False
    return True


def ended_in_silence() -> bool:
    """Returns True if this rank ended without a message, as after a kill, in the previous start by the same torchrun.
    torchrun itself names only the rank that ended first, which may only have lost its peer."""
    path, count = os.environ.get("TORCHELASTIC_ERROR_FILE"), _restarts()
    if not path or count == 0 or len(Path(path).parts) < 4:
        return False
    of_rank = Path(path).parent  # attempt_1/0/error.json
    before = of_rank.parent.with_name(f"attempt_{count - 1}") / of_rank.name
    was_there = of_rank.parent.name == f"attempt_{count}" and before.is_dir()
    return was_there and not (before / Path(path).name).exists()


def forget_end() -> None:
    """Delete the exit code that an earlier start of this job recorded."""
    for path in _end_file():
        with contextlib.suppress(OSError):
            path.unlink()


def note_end(code: int, by_any_rank: bool = False) -> None:
    """Record this start's exit code for launch/slurm/job.sh, because torchrun always exits with 1. The first record
    counts.

    Args:
        by_any_rank: every rank records the code, because the main rank may not reach this call.
    """
    for path in _end_file(by_any_rank):
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
            file.write(f"{code}\n")  # without it, job.sh only sees whether there is a new checkpoint


def end_launcher() -> None:
    """Ask torchrun to end if it has restarts left, because a restart on the same devices would fail again."""
    if "TORCHELASTIC_RUN_ID" in os.environ and _is_started_again():
        said = "torchrun is asked to end, which prints a traceback of its own (SignalException)"
        print(said, file=sys.stderr)
        drain_console()  # before torchrun ends this process
        os.kill(os.getppid(), signal.SIGTERM)


def _end_file(of_any_rank: bool = False) -> list[Path]:
    """Returns a list with the file for the exit code on the main rank of a submitted job, else an empty list."""
    folder = os.environ.get(SUBMISSION)
    is_asked = of_any_rank or os.environ.get("RANK", "0") == "0"
    return [Path(folder) / "exit_code"] if folder and is_asked else []


def _is_started_again() -> bool:
    """Returns True if torchrun has restarts left. torchrun then prints no summary."""
    return _restarts() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
