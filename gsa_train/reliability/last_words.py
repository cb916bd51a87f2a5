"""Why a process ends, said where its user reads it: on stderr, or in the summary that torchrun prints after all else.

torchrun's summary shows what its ranks wrote to the file TORCHELASTIC_ERROR_FILE. The file is that of
torch.distributed.elastic.multiprocessing.errors.ErrorHandler, written here without loading torch.
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
"""Environment variable of launch/slurm/job.sh: the folder of what submit.py submitted. All jobs of a chain count as
one."""


def say_last(message: str) -> None:
    """Say why this process ends: once, by torchrun's summary if there will be one, else on stderr."""
    if not tell_torchrun(message) or _is_started_again():
        print(message, file=sys.stderr)


def tell_torchrun(message: str) -> bool:
    """Whether this is a rank of torchrun's, which shows the message if its ranks are not started again."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    # Without a `py_callstack` the message stands in its place.
    failure = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": failure}, file)
    except OSError:
        return False
    return True


def ended_in_silence() -> bool:
    """This rank's process of the start before, by the same torchrun, has left no last words, as one that was killed.

    torchrun's own line names the rank whose end it heard of first, which may be one that lost its peer.
    """
    path, count = os.environ.get("TORCHELASTIC_ERROR_FILE"), _restarts()
    if not path or count == 0 or len(Path(path).parts) < 4:
        return False
    of_rank = Path(path).parent  # attempt_1/0/error.json
    before = of_rank.parent.with_name(f"attempt_{count - 1}") / of_rank.name
    was_there = of_rank.parent.name == f"attempt_{count}" and before.is_dir()
    return was_there and not (before / Path(path).name).exists()


def forget_end() -> None:
    """At the beginning of a start: what an earlier one of this job ended with no longer counts."""
    for path in _end_file():
        with contextlib.suppress(OSError):
            path.unlink()


def note_end(code: int, by_any_rank: bool = False) -> None:
    """In a job of launch/slurm/submit.py: how this start ends, for job.sh, as torchrun ends with 1 for all. The first
    note counts.

    Args:
        by_any_rank: all ranks end with it, and the main one may not come to it.
    """
    for path in _end_file(by_any_rank):
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
            file.write(f"{code}\n")  # without it the job sees whether there is a new checkpoint, and no more


def end_launcher() -> None:
    """Ask torchrun to end, if it would start its ranks again: that is of no use on the same devices."""
    if "TORCHELASTIC_RUN_ID" in os.environ and _is_started_again():
        print(
            "torchrun is asked to end, which prints a traceback of its own (SignalException)", file=sys.stderr
        )
        drain_console()  # torchrun ends this process, too, and may do so before its console is written
        os.kill(os.getppid(), signal.SIGTERM)


def _end_file(of_any_rank: bool = False) -> list[Path]:
    """On the main rank of such a job."""
    folder = os.environ.get(SUBMISSION)
    is_asked = of_any_rank or os.environ.get("RANK", "0") == "0"
    return [Path(folder) / "exit_code"] if folder and is_asked else []


def _is_started_again() -> bool:
    """Whether torchrun has restarts left, before which it prints no summary."""
    return _restarts() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
