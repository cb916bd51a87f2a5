"""Compares two sets of exact results to the last bit, and describes the first difference."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Mapping[str, Any]]
"""Maps a place (a step, or the problem itself) and a key to a float, an int, or a hash as text."""

Results = Mapping[str, Values | str]
"""Maps a run or problem to its values, or to the error if it failed."""


@dataclass(frozen=True)
class Comparison:
    name: str
    values: int
    """Number of values in the golden file."""
    different: int
    first: str
    """Describes the first difference; empty if all are equal."""
    new_keys: tuple[str, ...]
    """Keys that only today's results have: they are reported, but are no difference."""

    @property
    def equal(self) -> bool:
        return not self.first


def same_bits(golden: Any, today: Any) -> bool:
    """Compare bits: 0.0 and -0.0 differ, a NaN equals a NaN, and 1 differs from 1.0."""
    if isinstance(golden, float) and isinstance(today, float):
        if math.isnan(golden) and math.isnan(today):
            return True
        return struct.pack("<d", golden) == struct.pack("<d", today)
    return type(golden) is type(today) and bool(golden == today)


def relative_difference(golden: Any, today: Any) -> str:
    """Return |today - golden| / |golden| as text; empty if they are not numbers."""
    if not isinstance(golden, (int, float)) or not isinstance(today, (int, float)):
        return ""
    if golden == 0 or not math.isfinite(golden) or not math.isfinite(today):
        return "relative difference --"
    return f"relative difference {abs(today - golden) / abs(golden):.2e}"


def compare_one(name: str, golden: Values | str, today: Values | str | None) -> Comparison:
    """Compare one run or problem. An error in the golden file is also a difference, because it proves nothing."""
    if isinstance(golden, str):
        return Comparison(name, 0, 1, f"the golden file has an error in its place: {golden}", ())
    total = sum(len(keys) for keys in golden.values())
    if today is None:
        return Comparison(name, total, total, "missing today", ())
    if isinstance(today, str):
        return Comparison(name, total, total, f"failed today: {today}", ())
    different, first = 0, ""
    new_keys: dict[str, None] = {}
    for place, keys in golden.items():
        found = today.get(place)
        for key, value in keys.items():
            if found is not None and key in found and same_bits(value, found[key]):
                continue
            different += 1
            if not first:
                first = _in_words(place, key, value, found)
        new_keys.update(dict.fromkeys(key for key in found or {} if key not in keys))
    for place in today:
        if place not in golden:
            different += 1
            first = first or f"{place}: not in the golden file"
    if total == 0:
        different, first = 1, "the golden file has no values for it"
    return Comparison(name, total, different, first, tuple(new_keys))


def _in_words(place: str, key: str, golden: Any, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return f"{place}: missing today"
    if key not in found:
        return f"{place}, {key}: golden {golden!r}, missing today"
    today = found[key]
    moved = relative_difference(golden, today)
    return f"{place}, {key}: golden {golden!r}, today {today!r}" + (f", {moved}" if moved else "")


def compare(golden: Results, today: Results) -> list[Comparison]:
    """Compare in the order of the golden file; entries that only today has come last, as differences."""
    found = [compare_one(name, values, today.get(name)) for name, values in golden.items()]
    extra = [name for name in today if name not in golden]
    return found + [Comparison(name, 0, 1, "not in the golden file", ()) for name in extra]


def table(comparisons: list[Comparison]) -> str:
    """Format one line for each comparison and one for all."""
    width = max((len(found.name) for found in comparisons), default=0)
    lines = []
    for found in comparisons:
        verdict = "equal" if found.equal else f"{found.different} differ; first: {found.first}"
        lines.append(f"{found.name:{width}}  {found.values:6d} values  {verdict}")
    new_keys = sorted({key for found in comparisons for key in found.new_keys})
    if new_keys:
        lines.append(f"keys that the golden file does not have, not compared: {', '.join(new_keys)}")
    wrong = sum(not found.equal for found in comparisons)
    lines.append(f"{len(comparisons) - wrong} of {len(comparisons)} equal to the last bit")
    return "\n".join(lines)


def fingerprint_differences(golden: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """List the differences of two machines on which the results depend in addition to the code."""
    names = list(dict.fromkeys([*golden, *here]))
    return [
        f"{name} {golden.get(name, '--')} there, {here.get(name, '--')} here"
        for name in names
        if golden.get(name) != here.get(name)
    ]
