"""Mean and spread of a value over the seeds of an arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Spread:
    n: int
    """Runs with a finite value."""
    mean: float | None
    """Over these; None where there is none."""
    deviation: float | None
    """Sample standard deviation (n - 1 in the denominator); None for fewer than two."""
    not_finite: int
    """Runs whose value is no finite number: they diverged, and are in neither mean nor deviation."""


def spread_of(values: Iterable[float | None]) -> Spread:
    """Of each run's value; None for a run that has none."""
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    return Spread(
        n=len(finite),
        mean=statistics.fmean(finite) if finite else None,
        deviation=statistics.stdev(finite) if len(finite) > 1 else None,
        not_finite=len(known) - len(finite),
    )


def closer_than_spread(one: Spread, other: Spread) -> bool | None:
    """Whether two means differ by no more than the pooled standard deviation of one run; None where a spread is
    unknown."""
    if one.mean is None or other.mean is None or one.deviation is None or other.deviation is None:
        return None
    return abs(one.mean - other.mean) <= pooled(one, other)


def pooled(one: Spread, other: Spread) -> float:
    """sqrt(((n1 - 1) s1^2 + (n2 - 1) s2^2) / (n1 + n2 - 2))"""
    assert one.deviation is not None
    assert other.deviation is not None
    squares = (one.n - 1) * one.deviation**2 + (other.n - 1) * other.deviation**2
    return math.sqrt(squares / (one.n + other.n - 2))


def close_pairs(arms: Mapping[str, Spread]) -> list[str]:
    """A sentence about each pair of arms that is closer than its spread."""
    return [
        f"{one} and {other} are closer than their spread ({abs(a.mean - b.mean):.2g} apart, pooled standard deviation "
        f"{pooled(a, b):.2g}): more seeds may tell them apart"
        for (one, a), (other, b) in combinations(arms.items(), 2)
        if a.mean is not None and b.mean is not None and closer_than_spread(a, b)
    ]


def written(spread: Spread) -> str:
    """`3.521 ± 0.012`: the deviation with two digits that count, the mean with as many places. Without one: five."""
    lost = f"{spread.not_finite} diverged" if spread.not_finite else ""
    if spread.mean is None:
        return lost or "–"
    return "; ".join(filter(None, [number_with(spread.mean, spread.deviation), lost]))


def number_with(mean: float, deviation: float | None) -> str:
    if not deviation:
        five_digits = f"{mean:.5g}"
        # Not 3.7572e+05: tokens/s and largest activations are read, and compared, as whole numbers.
        alone = f"{float(five_digits):.0f}" if abs(mean) >= 1e5 else five_digits
        return alone + (" ± 0" if deviation == 0 else "")
    places = 1 - math.floor(math.log10(deviation))
    if places <= 0:
        return f"{round(mean, places):.0f} ± {round(deviation, places):.0f}"
    return f"{mean:.{places}f} ± {deviation:.{places}f}"
