"""Compute mean and standard deviation of a value over the seeds of an arm."""

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
    """Mean of the finite values; None without any."""
    deviation: float | None
    """Sample standard deviation (n - 1 in the denominator); None for fewer than two values."""
    not_finite: int
    """Runs whose value is not finite, because they diverged. Mean and deviation exclude them."""


def spread_of(values: Iterable[float | None]) -> Spread:
    """Compute the spread of the runs' values. A run without a value is None."""
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    return Spread(
        n=len(finite),
        mean=statistics.fmean(finite) if finite else None,
        deviation=statistics.stdev(finite) if len(finite) > 1 else None,
        not_finite=len(known) - len(finite),
    )


def difference(one: Mapping[int, float | None], other: Mapping[int, float | None]) -> Spread:
    """Return the spread of the differences between two arms (compared configs). Each seed with a value in both arms
    gives one difference. Runs with equal seeds read the same text, and start with equal weights where shapes match. The
    difference therefore cancels the seed's effect."""
    return spread_of(
        value - beside
        for seed, value in one.items()
        if value is not None and (beside := other.get(seed)) is not None
    )


def close_pairs(arms: Mapping[str, Mapping[int, float | None]]) -> list[tuple[str, str, Spread]]:
    """Return each pair of arms whose mean difference is at most the deviation of the seeds' differences.

    Args:
        arms: arm -> seed -> value
    """
    apart = ((one, other, difference(arms[one], arms[other])) for one, other in combinations(arms, 2))
    return [
        (one, other, found)
        for one, other, found in apart
        if found.mean is not None and found.deviation is not None and abs(found.mean) <= found.deviation
    ]


def written(spread: Spread) -> str:
    """Format a mean and its deviation as `3.521 ± 0.012`. The deviation has two significant digits, and the mean has
    the same number of decimal places as the deviation. If there is no deviation, the mean has five digits."""
    lost = f"{spread.not_finite} diverged" if spread.not_finite else ""
    if spread.mean is None:
        return lost or "–"
    return "; ".join(filter(None, [number_with(spread.mean, spread.deviation), lost]))


def number_with(mean: float, deviation: float | None) -> str:
    if not deviation:
        five_digits = f"{mean:.5g}"
        # Not 3.7572e+05, because tokens/s and largest activations are compared as whole numbers.
        alone = f"{float(five_digits):.0f}" if abs(mean) >= 1e5 else five_digits
        return alone + (" ± 0" if deviation == 0 else "")
    places = 1 - math.floor(math.log10(deviation))
    if places <= 0:
        return f"{round(mean, places):.0f} ± {round(deviation, places):.0f}"
    return f"{mean:.{places}f} ± {deviation:.{places}f}"
