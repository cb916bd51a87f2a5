"""What asks this process to stop: a signal, or the clock. Loads no torch, so that it stands before anything slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

import psutil

from gsa_train.process.console import drain_console
from gsa_train.process.exit_codes import INTERRUPTED

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""SIGTERM: torchrun, Slurm's preemption, `scancel`. SIGINT: Ctrl-C. SIGHUP: the terminal was closed. SIGQUIT: torchrun
passes it on. SIGUSR1: by custom, what `sbatch --signal` sends before the end; Grid Engine's soft limit of run time.
SIGUSR2: LSF before its limit, Grid Engine before it kills. SIGXCPU: a soft limit of CPU time."""

ONE_PRESS_SECONDS = 0.5
"""Some programs that start others pass Ctrl-C on to them, though the terminal has told them: that is one press."""

TIME_LIMIT = signal.NSIG
FOLDER_GONE = signal.NSIG + 1
LAUNCHER_GONE = signal.NSIG + 2
"""Reasons that are no signals, as numbers beside theirs."""

SLURM_MARGIN_FRACTION = 0.1
"""A margin before a Slurm job's end is at most this share of the job: else a short one would stop as it starts."""


class Stopped(Exception):
    """The run was asked to stop, has saved all its work, and ends before its last step."""

    def __init__(self, reason: int, step: int) -> None:
        self.reason, self.step = reason, step
        super().__init__(f"stopped by {reason_in_words(reason)} after step {step}")


def reason_in_words(reason: int) -> str:
    if reason == signal.SIGINT:
        return "Ctrl-C"
    words = {
        TIME_LIMIT: "the time limit",
        FOLDER_GONE: "the removal of its run folder",
        LAUNCHER_GONE: "the end of torchrun",
    }
    return words[reason] if reason in words else signal.Signals(reason).name


def _end_at_once(said: str) -> None:
    _say(said)
    drain_console()
    os._exit(INTERRUPTED)


def _say(line: str) -> None:
    """To stderr, on the main rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{line}", file=sys.stderr, flush=True)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Of STOP_SIGNALS, those that this process does not ignore."""
    return tuple(each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN)


class StopRequest:
    """Asked of this process only; `StopVote` makes it the decision of all ranks."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Time (of `time.time`) from which on the run stops."""
        self.folder_is_gone: Callable[[], bool] = lambda: False
        """Whether the run folder was removed or moved: what the run knows is saved then, and a new start writes the
        rest again."""
        self._signal = 0
        self._listens = False
        self._interrupted_at: float | None = None

    @property
    def reason(self) -> int:
        """0, the number of the last stop signal, LAUNCHER_GONE, FOLDER_GONE or TIME_LIMIT."""
        if self._signal:
            return self._signal
        if self.folder_is_gone():
            return FOLDER_GONE
        return TIME_LIMIT if self.deadline is not None and time.time() >= self.deadline else 0

    def watch(self) -> None:
        """From now on a thread looks after Ctrl-C: before `listen` it ends this process at once, with a line.

        Python's own handlers wait until the main thread returns from torch, which may take minutes of a backward pass.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # children share the pipe
        if signal.SIGINT in heeded_signals():
            signal.signal(signal.SIGINT, self._note)

        def wait() -> None:
            while number := os.read(reading, 1):
                self._heed(number[0])

        threading.Thread(target=wait, name="Ctrl-C", daemon=True).start()

    def listen(self) -> None:
        """From now on a stop signal is noted, and ends nothing: not a save, nor a step. Forked children inherit it.

        One that this process was started to ignore (nohup, a shell's background job) stays ignored. Only who presses
        Ctrl-C twice ends this process at once, if it watches.
        """
        for number in heeded_signals():
            signal.signal(number, self._note)
        self._listens = True

    def ask(self, reason: int) -> None:
        """As a signal does. From any thread."""
        self._signal = reason

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = int(number)

    def _heed(self, number: int) -> None:
        """Answer Ctrl-C, of which torchrun passes the first on as such, and ends its ranks by SIGTERM at the second."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        now = time.monotonic()
        if number == signal.SIGINT and not self._listens:
            _end_at_once("interrupted before the first step")
        elif self._interrupted_at is None:
            if number == signal.SIGINT:
                self._interrupted_at = now
                _say(
                    "interrupted: the step under way is finished and saved, then the run ends"
                    f"{_torchruns_patience()}; press Ctrl-C again to end at once"
                )
        elif number == signal.SIGTERM or now - self._interrupted_at >= ONE_PRESS_SECONDS:
            _end_at_once(
                "interrupted again: ended at once; the same command goes on from the last checkpoint"
            )


def _torchruns_patience() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f" (torchrun waits {launchers_patience():g} s for that)"


def launchers_patience() -> float:
    """Seconds that torchrun gives its ranks to end."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


@contextmanager
def children_keep_running() -> Iterator[None]:
    """Processes started inside never see a stop signal, which torchrun and Slurm send to children, too.

    They inherit this thread's mask, also those that are not forked and so lose the handlers. Whoever starts them
    must end them otherwise than by SIGTERM. This process gets what came when the block is over.
    """
    resource_tracker.ensure_running()  # which at its own start lets SIGTERM through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_deadline(
    limit_minutes: float, margin_minutes: float, environ: Mapping[str, str], began: float
) -> float | None:
    """When to stop: `limit_minutes` after the job's start, or `margin_minutes` before the Slurm job ends; the sooner.

    Args:
        limit_minutes: 0 for no limit of its own.
        environ: has SLURM_JOB_START_TIME and SLURM_JOB_END_TIME, in seconds of `time.time`, where Slurm sets them.
        began: start of the job; restarts by the same launcher do not put the limit off.

    Raises:
        ValueError: a time of Slurm's is no number.
    """
    ends = [began + 60 * limit_minutes] if limit_minutes > 0 else []
    if "SLURM_JOB_START_TIME" in environ and "SLURM_JOB_END_TIME" in environ:
        begin, end = (_slurm_time(name, environ) for name in ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"))
        ends.append(end - min(60 * margin_minutes, SLURM_MARGIN_FRACTION * (end - begin)))
    return min(ends, default=None)


def _slurm_time(name: str, environ: Mapping[str, str]) -> int:
    if not environ[name].isdecimal():
        raise ValueError(
            f"{name} = {environ[name]!r} in the environment: not seconds since 1970; correct it, or unset "
            "SLURM_JOB_START_TIME and SLURM_JOB_END_TIME: the run then knows no end of its job"
        )
    return int(environ[name])


def job_start_time() -> float:
    """When torchrun started, whose restarts start this process again; when this process did without torchrun."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return psutil.Process(os.getppid() if under_torchrun else os.getpid()).create_time()
