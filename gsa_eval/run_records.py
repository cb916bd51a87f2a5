"""Read the records and the events of a run, for the model card and for studies."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import NamedTuple

from gsa_train.metrics.record_checks import fault_of_record, of_other_lengths
from gsa_train.metrics.record_format import Record, read_records, values_in_words

KINDS: tuple[str, ...] = ("spike", "skipped_batches", "corruption", "stop", "warning")
KINDS += ("checkpoint_failed", "checkpoint_damaged", "restart_after_hang", "log_lost")
"""Kinds of events in the records that a model card names."""

logger = logging.getLogger(__name__)


class Event(NamedTuple):
    step: int
    kind: str
    """One of KINDS, or `fault`."""
    text: str


def records_of(run_dir: Path) -> list[Record]:
    """Return the records of metrics.jsonl, sorted by step. The file itself is not sorted, because the record of a
    checkpoint's save is written some steps after the saved step."""
    path = run_dir / "metrics.jsonl"
    records = read_records(path, fault_of_record)
    damaged = of_other_lengths(records)
    if damaged:
        logger.warning("%s: %d records have lists for another number of layers; left out", path, len(damaged))
        records = [record for record in records if not any(record is each for each in damaged)]
    return sorted(records, key=lambda record: int(record["step"]))


def events_of(run_dir: Path, records: list[Record]) -> list[Event]:
    """Return spikes, reactions to them, and faults, sorted by step. Also reads metrics_rewound.jsonl, which has the
    records that were removed when the run went back to an earlier step."""
    found = [_said(record, "") for record in records if record.get("event") in KINDS]
    rewound = run_dir / "metrics_rewound.jsonl"
    if rewound.is_file():
        again = (record for record in read_records(rewound, fault_of_record) if record.get("event") in KINDS)
        found += [_said(record, "; then rewound") for record in again]
    for report in sorted((run_dir / "faults").glob("*/report.txt")):
        if not report.is_file() or not _is_own(report, run_dir / "faults"):
            continue
        words = report.read_text(encoding="utf-8", errors="replace")
        # `<--` marks the rank that blocks the others (gsa_train.reliability.hang_watchdog).
        if named := re.search(r"after step (\d{1,15})\b.*<--", words):
            text = f"{report.parent.name}: {words.strip().splitlines()[0]} ({report})"
            found.append(Event(int(named[1]), "fault", text))
    return sorted(found, key=lambda event: event.step)


def _said(record: Record, ending: str) -> Event:
    words = values_in_words(record, without=("event", "step", "phase", "last_step"))
    if record["event"] == "spike":
        what = f"{record['signal'].replace('grad_', 'gradient ')} {record['value']:.4g}"
        limit = f" above {record['threshold']:.4g}" if math.isfinite(record["value"]) else ""
        words = [what + limit, f"action: {record['action']}"]
    if record["event"] == "skipped_batches":
        words.append(f"steps {record['step']} to {record['last_step']}")
    return Event(record["step"], record["event"], ", ".join(words) + ending)


def _is_own(path: Path, folder: Path) -> bool:
    """Returns whether a path lies in this folder after all links are resolved. If not, logs a warning: the link may
    point to any file of the user, and must not be read."""
    own = path.resolve().is_relative_to(folder.resolve())
    if not own:
        logger.warning("%s is a link that leads out of %s; left out", path, folder)
    return own
