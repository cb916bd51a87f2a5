"""Write a run's use of time to goodput.jsonl, and signs of life to alive.json, on the main rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsa_train.config import PhaseConfig
from gsa_train.metrics.goodput.account import Account, Accounting, Line
from gsa_train.metrics.goodput.ledger import ALIVE, FILE, alive_bytes
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.metrics.goodput.words import in_one_line, start_up_in_words
from gsa_train.metrics.metrics_file import MetricsFile
from gsa_train.services import Service, StepPlan

DIGITS = 4
"""Decimal places of seconds."""


class GoodputLog:
    """Writes the log on the main rank. On other ranks, and before `open`, every method does nothing."""

    def __init__(self, clock: RunClock) -> None:
        self.clock = clock
        self.step = 0
        """Step of the newest line."""
        self._accounting = Accounting()
        self._file: MetricsFile | None = None
        self._alive: int | None = None
        self._alive_lock = threading.Lock()
        self._newest_beat = (0, clock.began)
        self._over = False
        """True if the process has written its end, or only repeats the end of a complete run."""

    def open(self, folder: Path, step: int, before: list[Line], lost: list[Line], is_complete: bool) -> None:
        """Continue in a run folder, on the main rank.

        Args:
            step: the step after which this start continues.
            before: lines of the run so far.
            lost: the `lost` line of the previous process, if it wrote no end.
            is_complete: whether the run has no step left.

        Raises:
            OSError: a file cannot be opened.
        """
        self._accounting, self.step = Accounting([*before, *lost]), step
        if is_complete and self._accounting.is_complete:
            self._over = True  # no training follows, and the account is closed
            return
        path = folder / FILE
        has_moved = not path.exists()
        self._file = MetricsFile(path)
        for line in [*(before if has_moved else []), *lost]:
            self._file.write(dict(line))
        (folder / ALIVE).unlink(missing_ok=True)  # keeps the target of a link
        self._alive = os.open(folder / ALIVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._note("start", step, began=self.clock.began)
        self._say_alive(step, self.clock.now())

    def note(self, step: int, phase: str) -> None:
        self.step = step
        self._note("steps", step, phase=phase)

    def end(self, reason: str) -> None:
        """Record that the process ends on purpose. Later activity does not belong to the run."""
        self._note("end", self.step, reason=reason)
        self._over = True

    def account(self) -> Account:
        return self._accounting.account()

    def metrics(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        account = self.account()
        lost = {name: seconds for name, seconds in _rounded(account.lost_seconds).items() if seconds}
        return {"ettr": account.ettr, "lost_seconds": lost}

    def summary(self) -> dict[str, Any]:
        account = self.account()
        seconds = {"wall_seconds": account.wall_seconds, "productive_seconds": account.productive_seconds}
        return {"ettr": account.ettr, **_rounded(seconds), "lost_seconds": _rounded(account.lost_seconds)}

    def in_words(self) -> str:
        return in_one_line(self.account())

    def beat(self, step: int, progress: float) -> None:
        """Write a sign of life. Called from the watchdog's thread.

        Args:
            progress: time of the main thread's last progress, by `time.monotonic`.
        """
        self._say_alive(step, self.clock.unix_at(progress))

    def _say_alive(self, step: int, progress: float) -> None:
        with self._alive_lock:
            if self._alive is None or self._over:
                return
            self._newest_beat = step, progress
            progress, seconds = self.clock.read(until=progress)
            times = {"began": self.clock.began, "time": max(progress, self.clock.now()), "progress": progress}
            content = {**times, "step": step, "seconds": _rounded(seconds)}
            with contextlib.suppress(OSError):  # a stale file looks like a dead process's file
                os.pwrite(self._alive, alive_bytes(content), 0)

    def close(self) -> None:
        self._say_alive(*self._newest_beat)
        if self._file is not None:
            self._file.close()
            self._file = None
        with self._alive_lock:
            if self._alive is not None:
                os.close(self._alive)
                self._alive = None

    def _note(self, kind: str, step: int, **more: Any) -> None:
        if self._file is None or self._over:
            return
        now, seconds = self.clock.read()
        line = {"kind": kind, "step": step, "time": now, **more, "seconds": _rounded(seconds)}
        self._file.write(line)
        self._accounting.add(line)


@dataclass
class GoodputNotes(Service):
    """Adds the events of the training loop to the account."""

    goodput: GoodputLog
    message: Callable[[str], None]
    held_seconds: Callable[[], float]
    """Returns how many seconds updates have waited for a checkpoint's copies since its last call."""
    straggler_ratio: float
    _phase: str = ""
    _is_first: bool = True
    """True until this process has trained a step of the phase. The first step compiles."""
    _start_up_is_said: bool = False
    _first_wait_seconds: float | None = None
    """Time that the first step waited for text; None before the first step, and after a step is logged."""

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        self._phase, self._is_first, self._first_wait_seconds = phase.name, True, None
        self.goodput.clock.begin("training")

    def before_step(self, plan: StepPlan) -> None:
        if plan.trains and self._is_first:
            self.goodput.clock.begin("first_step")

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        if self._is_first:
            self._first_wait_seconds = wait_seconds

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        """Move the time of copies, reads and stragglers since the last logged step out of the training time."""
        rank, ratio = record["slowest_rank"], record["slowest_rank_ratio"]
        # Ranks differ in the first step, because they compile.
        slow = ratio >= self.straggler_ratio and self._first_wait_seconds is None
        waited = numbers.part_seconds["data_wait"] - (self._first_wait_seconds or 0.0)
        self._first_wait_seconds = None
        stragglers = numbers.work_seconds[rank] * (1 - 1 / ratio) if slow else 0.0
        self.goodput.clock.share_out(
            {"text": waited, "stragglers": stragglers, "copies": self.held_seconds()}
        )
        self.goodput.note(record["step"], self._phase)
        record |= self.goodput.metrics()

    def after_step(self, plan: StepPlan) -> None:
        if plan.trains and self._is_first:
            self._is_first = False
            self.goodput.note(plan.step, self._phase)
            _, seconds = self.goodput.clock.read()
            self.goodput.clock.begin("training")
            if not self._start_up_is_said:
                self.message(start_up_in_words(seconds))
            self._start_up_is_said = True

    def on_save(self, step: int) -> None:
        self.goodput.note(step, self._phase)

    def end_phase(self, step: int) -> None:
        self.goodput.note(step, self._phase)
        self.goodput.clock.begin("other")

    def on_stop(self) -> None:
        self.goodput.close()


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in seconds.items()}
