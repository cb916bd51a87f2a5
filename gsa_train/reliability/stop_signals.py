"""Handle stop requests to this process: signals and the time limit.

The module does not import torch, so that handlers are installed before the slow imports.
"""

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
"""Signals that request a stop. SIGTERM: torchrun, Slurm's preemption, `scancel`. SIGINT: Ctrl-C. SIGHUP: the terminal
was closed. SIGQUIT: forwarded by torchrun. SIGUSR1: usual choice for `sbatch --signal`; Grid Engine's soft time limit.
SIGUSR2: LSF before its time limit, Grid Engine before a kill. SIGXCPU: soft limit of CPU time."""

ONE_PRESS_SECONDS = 0.5
"""Two SIGINT within this time count as one press: a launcher may forward the Ctrl-C that the terminal also sends."""

TIME_LIMIT = signal.NSIG
FOLDER_GONE = signal.NSIG + 1
LAUNCHER_GONE = signal.NSIG + 2
"""Reasons without a signal. Their numbers follow the signal numbers."""

SLURM_MARGIN_FRACTION = 0.1
"""Largest margin before a Slurm job's end, as a share of the job, so that a short job does not stop at its start."""


class Stopped(Exception):
    """The run ends early on request, with a checkpoint of its newest step."""

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
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{line}", file=sys.stderr, flush=True)


def heeded_signals() -> tuple[signal.Signals, ...]:
    return tuple(each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN)


class StopRequest:
    """Records stop requests to this process. `StopVote` makes the decision for all ranks."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Time (`time.time`) at which the run stops."""
        self.folder_is_gone: Callable[[], bool] = lambda: False
        """Returns True if the run folder was removed or moved: the run then saves its state and stops."""
        self._signal = 0
        self._listens = False
        self._interrupted_at: float | None = None

    @property
    def reason(self) -> int:
        """Returns the last stop signal's number, LAUNCHER_GONE, FOLDER_GONE or TIME_LIMIT, or 0 without a request."""
        if self._signal:
            return self._signal
        if self.folder_is_gone():
            return FOLDER_GONE
        return TIME_LIMIT if self.deadline is not None and time.time() >= self.deadline else 0

    def watch(self) -> None:
        """Start a thread that handles Ctrl-C, because Python's signal handlers run only when the main thread returns
        from torch, possibly after minutes. If Ctrl-C is pressed before `listen` is called, the thread prints a line and
        ends this process at once."""
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
        """Install handlers that only record stop signals. Forked children inherit them.

        A signal that this process has ignored since its start, as with nohup or in a shell's background job, stays
        ignored. If `watch` was called, a second Ctrl-C ends this process at once.
        """
        for number in heeded_signals():
            signal.signal(number, self._note)
        self._listens = True

    def ask(self, reason: int) -> None:
        """Record a stop request, as a signal does. Callable from any thread."""
        self._signal = reason

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = int(number)

    def _heed(self, number: int) -> None:
        """Print the answer to Ctrl-C. torchrun forwards the first Ctrl-C as SIGINT, and sends SIGTERM at the second."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        now = time.monotonic()
        if number == signal.SIGINT and not self._listens:
            _end_at_once("interrupted before the first step")
        elif self._interrupted_at is None:
            if number == signal.SIGINT:
                self._interrupted_at = now
                waits = f" (torchrun waits {launchers_patience():g} s for that)"
                _say(
                    "interrupted: the step under way is finished and saved, then the run ends"
                    f"{waits if 'TORCHELASTIC_RUN_ID' in os.environ else ''}; press Ctrl-C again to end at once"
                )
        elif number == signal.SIGTERM or now - self._interrupted_at >= ONE_PRESS_SECONDS:
            _end_at_once(
                "interrupted again: ended at once; the same command goes on from the last checkpoint"
            )


def launchers_patience() -> float:
    """Returns the seconds that torchrun gives its ranks to end."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


@contextmanager
def children_keep_running() -> Iterator[None]:
    """Block stop signals in child processes that are started inside the `with` block. torchrun and Slurm also send
    their signals to child processes, and SIGTERM would end these processes.

    Child processes always inherit the thread's signal mask, but not always the signal handlers. This function therefore
    uses the mask. This process gets the signals after the `with` block.
    """
    resource_tracker.ensure_running()  # before the mask is set, because its start unblocks SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_deadline(
    limit_minutes: float, margin_minutes: float, environ: Mapping[str, str], began: float
) -> float | None:
    """Returns the time (`time.time`) to stop, or None without limits.

    There are up to two limits: `limit_minutes` after the start of the job, and `margin_minutes` before the end of the
    Slurm job. The earlier time counts. In a short Slurm job, the margin is smaller (SLURM_MARGIN_FRACTION).

    Args:
        limit_minutes: 0 for no limit.
        environ: environment; Slurm sets SLURM_JOB_START_TIME and SLURM_JOB_END_TIME (Unix seconds).
        began: start of the job; restarts by the same launcher do not extend the limit.

    Raises:
        ValueError: a time from Slurm is not a number.
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
    """Returns the start time of torchrun, which its restarts share. Without torchrun, returns this process's start
    time."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return psutil.Process(os.getppid() if under_torchrun else os.getpid()).create_time()
