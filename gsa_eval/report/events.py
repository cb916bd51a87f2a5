"""List the events of a run: restarts, spikes and the reaction to them, faults."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from gsa_eval.report.run_series import is_own, phase_starts
from gsa_train.metrics.record_checks import fault_of_record
from gsa_train.metrics.record_format import Record, read_records, values_in_words

KINDS = {
    "restart": ("restart", "#1f5fa8"),
    "fault": ("fault", "#111111"),
    "spike": ("spike", "#c62828"),
    "rewind": ("rewind", "#e67e00"),
    "lower_lr": ("lower learning rate", "#b8860b"),
    "skipped_batches": ("batches skipped", "#7a7a7a"),
    "corruption": ("silent data corruption", "#00695c"),
    "stop": ("stop by the monitor", "#6a1b1b"),
    "warning": ("warning", "#c9a400"),
    "checkpoint_failed": ("save failed", "#8a4fa3"),
    "checkpoint_damaged": ("checkpoint damaged", "#5b2a86"),
    "restart_after_hang": ("restart after a hang", "#37474f"),
    "log_lost": ("records lost", "#8d6e63"),
}
"""Kind -> title and color of its mark."""


class Event(NamedTuple):
    step: int | None
    """None: unknown."""
    phase: str
    kind: str
    """One of KINDS."""
    text: str


def events_of(folder: Path, records: list[Record], starts: list[dict[str, Any]]) -> list[Event]:
    """Returns the events in order of their steps.

    Args:
        folder: the run's folder, with reports of faults and records that a rewind took back.
        starts: lines of starts.jsonl (gsa_train.run_folder.starts).
    """
    found = [_said(record, "") for record in records if record.get("event") in KINDS]
    rewound = folder / "metrics_rewound.jsonl"
    if rewound.is_file():
        again = (record for record in read_records(rewound, fault_of_record) if record.get("event") in KINDS)
        found += [_said(record, "; then rewound") for record in again]
    phases = phase_starts(records)
    for start in starts[1:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["unix_seconds"]))
        text = f"{at}: continues after step {start['step']}, {start['layout']}, {start['host']}"
        found.append(Event(start["step"], _phase_at(start["step"], phases), "restart", text))
    for report in sorted((folder / "faults").glob("*/report.txt")):
        if not report.is_file() or not is_own(report, folder / "faults"):
            continue
        words = report.read_text(encoding="utf-8", errors="replace")
        if not words.strip():  # a full disk left an empty file
            continue
        # An arrow ends the line of a rank that blocks the others (gsa_train.reliability.hang_watchdog).
        named = re.search(r"after step (\d{1,15})\b.*<--", words)
        step = int(named[1]) if named else None
        phase = "" if step is None else _phase_at(step, phases)
        found.append(
            Event(step, phase, "fault", f"{report.parent.name}: {words.strip().splitlines()[0]} ({report})")
        )
    return sorted(found, key=lambda event: -1 if event.step is None else event.step)


def _said(record: Record, ending: str) -> Event:
    words = values_in_words(record, without=("event", "step", "phase", "last_step"))
    if record["event"] == "spike":
        what = f"{record['signal'].replace('grad_', 'gradient ')} {record['value']:.4g}"
        limit = f" above {record['threshold']:.4g}" if math.isfinite(record["value"]) else ""
        words = [what + limit, f"action: {record['action']}"]
    if record["event"] == "skipped_batches":
        words.append(f"steps {record['step']} to {record['last_step']}")
    return Event(record["step"], record["phase"], record["event"], ", ".join(words) + ending)


def _phase_at(step: int, phases: list[tuple[int, str]]) -> str:
    return next((name for first, name in reversed(phases) if step >= first), phases[0][1] if phases else "")
