"""Compare two sets of exact results, value by value and to the last bit, and say where they part."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Mapping[str, Any]]
"""Place (a step, or the problem itself) -> key -> float, int, or a hash as text."""

Results = Mapping[str, Values | str]
"""Run or problem -> its values; of one that failed the error as text."""


@dataclass(frozen=True)
class Comparison:
    """Compares one run or problem."""

    name: str
    values: int
    """Of the golden file."""
    different: int
    first: str
    """The first difference in words; empty where all are equal."""
    new_keys: tuple[str, ...]
    """Keys that today's results have beside the golden ones: no difference, but worth a word."""

    @property
    def equal(self) -> bool:
        return not self.first


def same_bits(golden: Any, today: Any) -> bool:
    """0.0 and -0.0 differ, a NaN equals a NaN, and 1 differs from 1.0."""
    if isinstance(golden, float) and isinstance(today, float):
        if math.isnan(golden) and math.isnan(today):
            return True
        return struct.pack("<d", golden) == struct.pack("<d", today)
    return type(golden) is type(today) and bool(golden == today)


def relative_difference(golden: Any, today: Any) -> str:
    """|today - golden| / |golden| as text; empty where they are no numbers."""
    if not isinstance(golden, (int, float)) or not isinstance(today, (int, float)):
        return ""
    if golden == 0 or not math.isfinite(golden) or not math.isfinite(today):
        return "relative difference --"
    return f"relative difference {abs(today - golden) / abs(golden):.2e}"


def compare_one(name: str, golden: Values | str, today: Values | str | None) -> Comparison:
    """One run or problem. An error in the golden file is a difference, too: it proves nothing."""
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
    """In the order of the golden file; what only today has comes last, as a difference."""
    found = [compare_one(name, values, today.get(name)) for name, values in golden.items()]
    extra = [name for name in today if name not in golden]
    return found + [Comparison(name, 0, 1, "not in the golden file", ()) for name in extra]


def table(comparisons: list[Comparison]) -> str:
    """One line for each, and one for all."""
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
    """What the results depend on besides the code, where the two machines differ in it."""
    names = list(dict.fromkeys([*golden, *here]))
    return [
        f"{name} {golden.get(name, '--')} there, {here.get(name, '--')} here"
        for name in names
        if golden.get(name) != here.get(name)
    ]
