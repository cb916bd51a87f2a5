"""Check records before they are used. A flipped bit may leave valid JSON with a missing key or a wrong value."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from gsa_train.metrics.panels import PANELS, PICTURES

Record = dict[str, Any]

LARGEST = 1e300
LARGEST_STEP = 1 << 53
LATEST_TIME = 1e11
"""Unix seconds, far in the future."""
TEXTS = frozenset(
    "phase event validation_set signal action reason file checkpoint_name checkpoint_error prompt text".split()  # noqa: SIM905
)
"""Keys whose strings are never numbers. The model itself writes the values of `prompt` and `text`, in samples."""
NUMBERS = frozenset(key for panel in PANELS for key in panel.keys) | {"tokens", "step_seconds"}
"""Keys of numbers that are drawn or used in calculations."""
COMPARED = frozenset(["value", "threshold"])
"""Keys of a spike's numbers."""
NEEDED: dict[str, tuple[str, ...]] = {
    "spike": ("signal", "value", "threshold", "action"),
    "skipped_batches": ("last_step",),
}
"""Maps an event to the keys that its record needs, in addition to step and phase."""


def fault_of_record(record: Record) -> str:
    """Returns the fault of a record of metrics.jsonl after `numbers_back`, or "". A changed digit is
    not detected."""
    if not isinstance(record.get("phase"), str):
        return "has no phase"
    event = record.get("event", "")
    if not isinstance(event, str):
        return f"has event = {event!r:.40}"
    missing = [name for name in NEEDED.get(event, ()) if record.get(name) is None]
    if missing:
        return f"is of event {event} without {', '.join(missing)}"
    for name, value in record.items():
        if value is not None and not _fits(name, value, bool(event)):
            return f"has {name:.40} = {value!r:.40}"
    return ""


def is_number(value: Any) -> bool:
    """Whether `value` is a number, finite or not, in the range that can be drawn."""
    return type(value) in (int, float) and not LARGEST < abs(value) < math.inf


def is_time(value: Any) -> bool:
    """Whether `value` is a time in Unix seconds."""
    return is_number(value) and 0 <= value < LATEST_TIME


def is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_STEP


def of_other_lengths(records: list[Record]) -> list[Record]:
    """Returns records in which a list with a value per layer has an unusual length. A flipped bit may turn a decimal
    point into a comma."""
    lengths: dict[str, Counter[int]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, list) and name.startswith("layer_"):
                lengths.setdefault(name, Counter())[len(value)] += 1
    usual = {name: counts.most_common(1)[0][0] for name, counts in lengths.items()}
    return [
        record
        for record in records
        if any(
            isinstance(record.get(name), list) and len(record[name]) != length
            for name, length in usual.items()
        )
    ]


def _fits(name: str, value: Any, of_event: bool) -> bool:
    if name in ("step", "last_step"):
        return is_step(value)
    if name == "time":
        return is_time(value)
    if name == "tokens":
        return type(value) is int and is_number(value)
    if name in TEXTS:
        return isinstance(value, str)
    if name in PICTURES:
        return isinstance(value, list) and all(map(_is_row, value))
    if name.startswith("layer_"):
        return _is_row(value)
    if isinstance(value, dict):
        return name not in NUMBERS | COMPARED and _is_row(list(value.values()))
    if name in NUMBERS | COMPARED or name.startswith("validation_"):
        return is_number(value)
    return of_event or is_number(value) or (isinstance(value, list) and all(map(_is_row, value)))


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(each is None or is_number(each) for each in value)
