"""Define alerts for the user of a run: spikes, stalls, failed saves. W&B sends them (wandb_sink)."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from gsa_train.metrics.record_format import values_in_words

INTERVAL_SECONDS = 900.0
"""Minimum time between alerts with the same title. The next alert counts the suppressed ones."""
SLOW_RATIO = 3.0
"""Alert if an interval's seconds per step exceed the median of earlier ones by this factor."""
SLOW_HISTORY = 16
"""Number of logged intervals in that median."""
DATA_WAIT = 0.25
"""Alert above this share of time waiting for data."""
IN_A_ROW = 3
"""Number of consecutive logged intervals above DATA_WAIT, or with a slow rank, before an alert."""

TITLES = {
    "spike": "Spike",
    "corruption": "Silent data corruption",
    "stop": "The monitor stopped the run",
    "checkpoint_failed": "A save failed",
    "checkpoint_damaged": "A checkpoint is damaged",
    "hang": "The run hangs",
    "restart_after_hang": "Restarted after a hang",
    "log_failed": "A log cannot be written",
    "log_written": "A log is written again",
    "log_lost": "A log is written again, without some records",
}
"""Maps events to the titles of their alerts."""
ERRORS = frozenset({"corruption", "stop", "checkpoint_failed", "checkpoint_damaged", "hang", "log_failed"})


class Alert(NamedTuple):
    title: str
    text: str
    level: str
    """W&B's level: WARN or ERROR."""


class Alerts:
    """Reads every record of a run, in order."""

    def __init__(self, straggler_ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._straggler_ratio, self._clock = straggler_ratio, clock
        self._step_seconds: deque[float] = deque(maxlen=SLOW_HISTORY)
        self._in_a_row = {"data": 0, "rank": 0}
        self._phase = ""
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def of(self, record: dict[str, Any]) -> list[Alert]:
        """Returns the alerts for this record, except repetitions within a short time."""
        found = [self._of_event(record)] if "event" in record else self._of_step(record)
        return [alert for each in found if each is not None and (alert := self._in_time(each)) is not None]

    def _of_event(self, record: dict[str, Any]) -> Alert | None:
        event = record["event"]
        if event not in TITLES:
            return None
        text = ", ".join(values_in_words(record, without=("event", "phase")))
        return Alert(TITLES[event], text, "ERROR" if event in ERRORS else "WARN")

    def _of_step(self, record: dict[str, Any]) -> list[Alert | None]:
        if record["phase"] != self._phase:  # the seconds per step differ between phases
            self._phase = record["phase"]
            self._step_seconds.clear()
        where, found = f"step {record['step']}", list[Alert | None]()
        seconds = record.get("step_seconds")
        if seconds is not None:
            usual = statistics.median(self._step_seconds) if self._step_seconds else 0.0
            if len(self._step_seconds) == SLOW_HISTORY and seconds > SLOW_RATIO * usual:
                text = f"{where}: {seconds:.3g} s per step, {usual:.3g} s before"
                found.append(Alert("Slow steps", text, "WARN"))
            self._step_seconds.append(seconds)
        wait, ratio = record.get("data_wait") or 0.0, record.get("slowest_rank_ratio") or 0.0
        if self._lasts("data", wait >= DATA_WAIT):
            found.append(Alert("Waiting for data", f"{where}: {wait:.0%} of the time", "WARN"))
        if self._lasts("rank", ratio >= self._straggler_ratio):
            text = (
                f"{where}: rank {record['slowest_rank']} works {ratio:.2f} times as long as the median rank"
            )
            found.append(Alert("Slow rank", text, "WARN"))
        return found

    def _lasts(self, what: str, now: bool) -> bool:
        self._in_a_row[what] = self._in_a_row[what] + 1 if now else 0
        return self._in_a_row[what] >= IN_A_ROW

    def _in_time(self, alert: Alert) -> Alert | None:
        now = self._clock()
        if now - self._said.get(alert.title, -INTERVAL_SECONDS) < INTERVAL_SECONDS:
            self._unsaid[alert.title] = self._unsaid.get(alert.title, 0) + 1
            return None
        self._said[alert.title] = now
        more = self._unsaid.pop(alert.title, 0)
        return alert._replace(text=f"{alert.text} (and {more} more since the last alert)") if more else alert
