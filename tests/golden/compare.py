"""Compares two sets of exact results to the last bit, and describes the first difference."""

import math
import struct
from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Mapping[str, Any]]
"""Maps a place (a step, or the problem itself) and a key to a float, an int, or a hash as text."""

Results = Mapping[str, Values | str]
"""Maps a run or problem to its values, or to the error if it failed."""


def same_bits(golden: Any, today: Any) -> bool:
    """Compare bits: 0.0 and -0.0 differ, a NaN equals a NaN, and 1 differs from 1.0."""
    if isinstance(golden, float) and isinstance(today, float):
        if math.isnan(golden) and math.isnan(today):
            return True
        return struct.pack("<d", golden) == struct.pack("<d", today)
    return type(golden) is type(today) and bool(golden == today)


def differences(golden: Values | str | None, today: Values | str | None) -> list[str]:
    """Describe how today's results of one run or problem differ from the results in the golden file. If the golden file
    has an error instead of results, this is a difference, too."""
    if golden is None:
        return ["not in the golden file"]
    if isinstance(golden, str):
        return [f"the golden file has an error in its place: {golden}"]
    if today is None:
        return ["missing today"]
    if isinstance(today, str):
        return [f"failed today: {today}"]
    if not any(golden.values()):
        return ["the golden file has no values for it"]
    found = []
    for place, keys in golden.items():
        here = today.get(place, {})
        for key, value in keys.items():
            if key not in here:
                found.append(f"{place}, {key}: golden {value!r}, missing today")
            elif not same_bits(value, here[key]):
                moved = relative_difference(value, here[key])
                found.append(f"{place}, {key}: golden {value!r}, today {here[key]!r}{moved}")
    return found + [f"{place}: not in the golden file" for place in today if place not in golden]


def relative_difference(golden: Any, today: Any) -> str:
    """Return |today - golden| / |golden| as text; empty if there is none."""
    numbers = all(isinstance(each, (int, float)) and math.isfinite(each) for each in (golden, today))
    return f", relative difference {abs(today - golden) / abs(golden):.2e}" if numbers and golden else ""


def new_keys(golden: Results, today: Results) -> list[str]:
    """Return the keys that only today's results have: they are reported, but are not differences."""
    found = set()
    for name, values in golden.items():
        here = today.get(name)
        if isinstance(values, Mapping) and isinstance(here, Mapping):
            found |= {key for place in values for key in here.get(place, {}) if key not in values[place]}
    return sorted(found)


def table(golden: Results, today: Results) -> tuple[str, bool]:
    """Return a line for each run or problem and one for all, and whether all are equal."""
    names = list(dict.fromkeys([*golden, *today]))
    found = {name: differences(golden.get(name), today.get(name)) for name in names}
    width, lines = max(map(len, names), default=0), []
    for name, different in found.items():
        verdict = f"{len(different)} differ; first: {different[0]}" if different else "equal"
        lines.append(f"{name:{width}}  {verdict}")
    if keys := new_keys(golden, today):
        lines.append(f"keys that the golden file does not have, not compared: {', '.join(keys)}")
    equal = sum(not different for different in found.values())
    return "\n".join([*lines, f"{equal} of {len(names)} equal to the last bit"]), equal == len(names)


def fingerprint_differences(golden: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """List the differences of two machines on which the results depend in addition to the code."""
    return [
        f"{name} {golden.get(name, '--')} there, {here.get(name, '--')} here"
        for name in dict.fromkeys([*golden, *here])
        if golden.get(name) != here.get(name)
    ]
