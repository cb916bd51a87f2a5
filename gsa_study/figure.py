"""Draw the figure of a study's page: a plot of the first metric of each arm, and plots of the losses over tokens and
over training time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator, StrMethodFormatter

from gsa_study.columns import Column
from gsa_study.run_record import RunRecord
from gsa_study.tables import Results

Color = tuple[float, ...]
LOG_FROM = 2.0
"""Ratio of the largest to the smallest value from which the scale is logarithmic."""


@dataclass(frozen=True)
class ArmDots:
    arm: str
    runs: tuple[RunRecord, ...]
    """Finished runs whose value is a number, in the order of the seeds."""
    values: tuple[float, ...]
    """The values of these runs."""

    @property
    def mean(self) -> float:
        return fmean(self.values)


def arm_dots(results: Results, column: Column) -> list[ArmDots]:
    """Return a row for each arm that has a finished run with this value. The smallest mean (the best loss) comes
    first."""
    found = []
    for arm in results.arms:
        runs = [each for each in results.finished if each.run.arm == arm]
        values = ((each, column.values.get(each.run.name)) for each in runs)
        known = [(each, value) for each, value in values if value is not None and math.isfinite(value)]
        if known:
            found.append(ArmDots(arm, tuple(each for each, _ in known), tuple(value for _, value in known)))
    return sorted(found, key=lambda dots: dots.mean)


def write_study_figure(results: Results, path: Path) -> Path:
    """Draw a row for each arm, with a dot for each run. The dots show the first metric of the study for which any
    finished run has a value. If there is no such metric, the figure is empty. If at least half of the arms have
    recorded losses, two plots to the right show the losses, one by tokens and one by training time."""
    found = ((column.title, arm_dots(results, column)) for column in results.columns)
    title, rows = next((each for each in found if each[1]), ("", []))
    with_losses = sum(any(run.losses for run in row.runs) for row in rows)
    columns = 3 if 2 * with_losses >= len(rows) else 1
    figure, axes = plots(12 + columns, max(3.6, 1.2 + 0.26 * len(rows)), columns)
    last = max(1, len(rows) - 1)
    colors = [colormaps["viridis"](0.92 * place / last) for place in range(len(rows))]
    if rows:
        _draw_dots(axes[0], rows, colors, title)
        for ax, by_time in zip(axes[1:], (False, True), strict=False):
            _draw_losses(ax, rows, colors, by_time)
    figure.savefig(path)
    return path


def plots(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, axes


def _draw_dots(ax: Axes, rows: Sequence[ArmDots], colors: Sequence[Color], label: str) -> None:
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        ax.plot(row.values, [place] * len(row.values), "o", color=color, markersize=6)
    values = [value for row in rows for value in row.values]
    if min(values) > 0 and max(values) > LOG_FROM * min(values):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.set_yticks(range(len(rows)), [row.arm for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel(f"{label} (a dot for each seed)")


def _draw_losses(ax: Axes, rows: Sequence[ArmDots], colors: Sequence[Color], by_time: bool) -> None:
    """Draw the losses of each arm's first seed that has recorded losses. The best arm is drawn last."""
    lines, is_first = [], True
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        drawn = next((run for run in row.runs if run.losses), None)
        is_first &= drawn is row.runs[0]
        if drawn is not None:
            points = [point for point in drawn.losses if not by_time or point.seconds is not None]
            x = [(point.seconds or 0.0) / 60 if by_time else point.tokens for point in points]
            y = [point.loss for point in points]
            ax.plot(x, y, color=color, linewidth=1.4, zorder=len(rows) - place)
            lines.append((x, y))
    if shown := shown_range(lines):
        ax.set_ylim(*shown)
    if not by_time:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_xlabel("minutes of training" if by_time else "tokens")
    of_another = "train loss (nats per token) of the\nfirst seed that has recorded ones"
    ax.set_ylabel("train loss of the first seed (nats per token)" if is_first else of_another)


def shown_range(
    lines: Sequence[tuple[Sequence[float], Sequence[float | None]]],
) -> tuple[float, float] | None:
    """Returns bounds of a linear y axis that ignore the first steps and outliers, or None for the range of all values.

    The bounds ignore the first tenth of the x axis. They cover all later values except outliers. Let q2 and q98 be the
    2nd and the 98th percentile of these values. A value below q2 - (q98 - q2) / 2 or above q98 + (q98 - q2) / 2 is an
    outlier.

    Args:
        lines: x and y of each.
    """
    points = [
        (x, y) for xs, ys in lines for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)
    ]
    if len(points) < 10:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    later = [y for x, y in points if x >= first + (last - first) / 10]
    low, high = np.quantile(later, [0.02, 0.98])
    reach = (high - low) / 2
    low, high = max(low - reach, min(later)), min(high + reach, max(later))
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    bounds = float(low - margin), float(high + margin)
    return bounds if all(map(math.isfinite, bounds)) else None
