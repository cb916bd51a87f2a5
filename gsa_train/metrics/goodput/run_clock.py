"""What the main thread spends its time on, from the moment at which its process began: each second once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from gsa_train.metrics.goodput.account import ACTIVITIES


def process_began(pid: int) -> float:
    """Unix seconds, to some milliseconds. psutil adds to the whole second of the boot, and is up to one off."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    ticks = int(after_name[19])  # starttime, the 22nd field: since the boot
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class _Spent(NamedTuple):
    """Never changed, only replaced: the watchdog's thread reads it."""

    seconds: dict[str, float]
    """By activity, without the one under way."""
    activity: str
    since: float


class RunClock:
    """Times are Unix seconds that never jump: of the monotonic clock, which is set once."""

    def __init__(self, began: float | None = None) -> None:
        """
        Args:
            began: when the process began; None asks the system. Until now it has loaded its packages.
        """
        self.began = process_began(os.getpid()) if began is None else began
        self._offset = time.time() - time.monotonic()
        self._spent = _Spent({}, "import", self.began)
        self._shared_out = 0.0
        """Seconds of training that `share_out` has left as such."""

    def now(self) -> float:
        return self.unix_at(time.monotonic())

    def unix_at(self, monotonic: float) -> float:
        """Of a moment that `time.monotonic` told."""
        return self._offset + monotonic

    def begin(self, activity: str) -> None:
        """The main thread does this from now on: one of goodput.account.ACTIVITIES."""
        assert activity in ACTIVITIES, activity
        now = self.now()
        self._spent = _Spent(_until(self._spent, now), activity, now)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """This, and then again what was before. An error leaves it at this: a peer may have died long before, and what
        has passed since the last progress is no part of any activity."""
        before = self._spent.activity
        self.begin(activity)
        yield
        self.begin(before)

    def share_out(self, parts: Mapping[str, float]) -> None:
        """Move seconds of the training since the last call to these activities, at most as much time as has passed."""
        now = self.now()
        seconds = _until(self._spent, now)
        left = seconds.get("training", 0.0) - self._shared_out
        for activity, wanted in parts.items():
            moved = max(0.0, min(wanted, left))
            left -= moved
            seconds["training"] = seconds.get("training", 0.0) - moved
            seconds[activity] = seconds.get(activity, 0.0) + moved
        self._shared_out = seconds.get("training", 0.0)
        self._spent = _Spent(seconds, self._spent.activity, now)

    def read(self, until: float | None = None) -> tuple[float, dict[str, float]]:
        """A moment, now or that one but not before the activity under way began, and the seconds by activity up to it.
        From any thread."""
        spent = self._spent
        moment = max(spent.since, self.now() if until is None else until)
        return moment, _until(spent, moment)


def _until(spent: _Spent, until: float) -> dict[str, float]:
    seconds = dict(spent.seconds)
    seconds[spent.activity] = seconds.get(spent.activity, 0.0) + max(0.0, until - spent.since)
    return seconds
