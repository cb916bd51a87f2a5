"""Draw a study's charts: the metrics of its runs against tokens and against training time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from gsa_eval.report.charts import COLORS, DASHES, FEW_POINTS, MOST_POINTS, Chart, thin
from gsa_eval.report.run_series import shown_range
from gsa_study.run_metrics import RunMetrics
from gsa_study.tables import Results

LOSS = "loss"


def study_charts(results: Results) -> list[Chart]:
    """Draw loss by tokens and by time, then every other metric of training by tokens."""
    keys = [metric.key for metric in results.study.config.metrics if metric.source == "training"]
    found = [_chart(results, LOSS, "tokens"), _chart(results, LOSS, "time")]
    found += [_chart(results, key, "tokens") for key in dict.fromkeys(keys) if key != LOSS]
    return [chart for chart in found if chart is not None]


def _chart(results: Results, key: str, over: str) -> Chart | None:
    """Returns a chart with a line for each run, or None if no run has a value. Arms have colors, and seeds have
    dashes."""
    lines: list[dict[str, Any]] = []
    for number, arm in enumerate(results.arms):
        of_arm = [each for each in results.values if each.run.arm == arm]
        drawn = 0
        for each in sorted(of_arm, key=lambda values: values.run.seed):
            points = _points(each, key, over)
            if points:
                look = {
                    "color": COLORS[number % len(COLORS)],
                    "dash": DASHES[drawn % len(DASHES)],
                    "width": 1.6,
                }
                lines.append(_line(each.run.name, arm, points, look, is_first=drawn == 0))
                drawn += 1
    if not lines:
        return None
    axis = {
        "title": {"text": "tokens" if over == "tokens" else "minutes of training"},
        "gridcolor": "#e8ebf0",
    }
    if over == "tokens":
        axis["tickformat"] = "~s"
    y_axis: dict[str, Any] = {"gridcolor": "#e8ebf0", "zeroline": False, "hoverformat": ".4~g"}
    if shown := shown_range([(line["x"], line["y"]) for line in lines]):
        y_axis["range"] = list(shown)
    layout = {
        "height": 360, "margin": {"l": 60, "r": 20, "t": 10, "b": 80}, "hovermode": "closest",
        "plot_bgcolor": "#fff", "xaxis": axis, "yaxis": y_axis,
        "legend": {"orientation": "h", "y": -0.22}, "showlegend": True,
    }  # fmt: skip
    if over == "time":
        layout["meta"] = "no steps"  # does not follow the others' zoom
    title = f"{key.replace('_', ' ')} by {'tokens' if over == 'tokens' else 'training time'}"
    return Chart(title, {"data": lines, "layout": layout})


def _points(each: RunMetrics, key: str, over: str) -> list[tuple[float, float]]:
    if over == "tokens":
        return each.curve(key, "tokens")
    return [(seconds / 60, value) for seconds, value in each.curve(key, "seconds")]


def _line(
    name: str, arm: str, points: Sequence[tuple[float, float]], look: dict[str, Any], is_first: bool
) -> dict[str, Any]:
    kept = thin([y for _, y in points], MOST_POINTS)
    return {
        "type": "scatter", "mode": "lines+markers" if len(points) <= FEW_POINTS else "lines", "line": look,
        "marker": {"size": 4}, "name": html.escape(arm), "legendgroup": html.escape(arm), "showlegend": is_first,
        "x": [float(f"{points[at][0]:.6g}") for at in kept],
        "y": [float(f"{points[at][1]:.5g}") if math.isfinite(points[at][1]) else None for at in kept],
        "hovertemplate": f"{html.escape(name)}: %{{y}}<extra></extra>",
    }  # fmt: skip
