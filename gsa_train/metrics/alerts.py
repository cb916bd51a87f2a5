"""Define alerts for the user of a run: spikes, failed saves, hangs. W&B sends them (wandb_sink)."""

from __future__ import annotations

from typing import Any, NamedTuple

from gsa_train.metrics.record_format import values_in_words

INTERVAL_SECONDS = 900.0
"""Minimum time between alerts with the same title."""

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
"""Event -> title of its alert."""
ERRORS = frozenset({"corruption", "stop", "checkpoint_failed", "checkpoint_damaged", "hang", "log_failed"})


class Alert(NamedTuple):
    title: str
    text: str
    level: str
    """W&B's level: WARN or ERROR."""


def alert_of(record: dict[str, Any]) -> Alert | None:
    event = record.get("event")
    if event not in TITLES:
        return None
    text = ", ".join(values_in_words(record, without=("event", "phase")))
    return Alert(TITLES[event], text, "ERROR" if event in ERRORS else "WARN")
