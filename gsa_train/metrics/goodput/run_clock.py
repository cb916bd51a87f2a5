"""Measure the main thread's activities from the beginning of its process. Each second is counted once."""

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
    """Returns Unix seconds, exact to milliseconds. psutil rounds the time of the boot to seconds."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    ticks = int(after_name[19])  # starttime, the 22nd field: ticks since the boot
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class _Spent(NamedTuple):
    """Holds the seconds spent so far. It is immutable, because the watchdog's thread reads it."""

    seconds: dict[str, float]
    """Seconds by activity, without the current activity."""
    activity: str
    since: float


class RunClock:
    """Measures Unix seconds that never jump: the monotonic clock plus a fixed offset."""

    def __init__(self, began: float | None = None) -> None:
        """
        Args:
            began: when the process began; None asks the system. The time until now counts as import.
        """
        self.began = process_began(os.getpid()) if began is None else began
        self._offset = time.time() - time.monotonic()
        self._spent = _Spent({}, "import", self.began)
        self._shared_out = 0.0
        """Seconds of training that `share_out` has not moved."""

    def now(self) -> float:
        return self.unix_at(time.monotonic())

    def unix_at(self, monotonic: float) -> float:
        return self._offset + monotonic

    def begin(self, activity: str) -> None:
        """Begin an activity of the main thread: one of goodput.account.ACTIVITIES."""
        assert activity in ACTIVITIES, activity
        now = self.now()
        self._spent = _Spent(_until(self._spent, now), activity, now)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time of the `with` block as this activity, then return to the previous activity.

        If the block raises an error, this activity continues, and `read(until)` can end the activity at the main
        thread's last progress. Later time counts as lost, because the main thread may have waited for a dead peer.
        """
        before = self._spent.activity
        self.begin(activity)
        yield
        self.begin(before)

    def share_out(self, parts: Mapping[str, float]) -> None:
        """Move seconds from training to the activities in `parts`. Only the training time since the last call can be
        moved."""
        now = self.now()
        seconds = {"training": 0.0, **_until(self._spent, now)}
        for activity, wanted in parts.items():
            moved = max(0.0, min(wanted, seconds["training"] - self._shared_out))
            seconds["training"] -= moved
            seconds[activity] = seconds.get(activity, 0.0) + moved
        self._shared_out = seconds["training"]
        self._spent = _Spent(seconds, self._spent.activity, now)

    def read(self, until: float | None = None) -> tuple[float, dict[str, float]]:
        """Return a Unix time, and the seconds spent on each activity until then. The time is `until` (None: now), or
        the current activity's start if that is later. Any thread may call this method."""
        spent = self._spent
        moment = max(spent.since, self.now() if until is None else until)
        return moment, _until(spent, moment)


def _until(spent: _Spent, until: float) -> dict[str, float]:
    seconds = dict(spent.seconds)
    seconds[spent.activity] = seconds.get(spent.activity, 0.0) + max(0.0, until - spent.since)
    return seconds
