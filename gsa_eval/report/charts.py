"""Build the charts of the HTML report as dicts, which plotly's JavaScript draws."""

from __future__ import annotations

import html
import math
import statistics
from typing import Any, NamedTuple

from gsa_eval.report.events import KINDS
from gsa_eval.report.run_files import RunFiles, baselines_of
from gsa_eval.report.run_series import (
    first_step,
    has,
    series,
    shown_range,
    tokens_at,
    with_all_lines,
    with_key,
)
from gsa_train.metrics.panels import LAYERS, PICTURES, Panel

Figure = dict[str, Any]
"""`data` and `layout` of plotly, or a part of them."""


class Chart(NamedTuple):
    title: str
    figure: Figure


COLORS = ("#1f5fa8", "#d1661f", "#3b8c4f", "#8a4fa3", "#b0343c", "#7a7a7a", "#0f8b8d", "#a07a00")
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_POINTS = 600
"""Largest number of points of a line."""
MOST_COLUMNS = 160
"""Largest number of columns of a picture by layer."""
MOST_MARKS = 400
"""Largest number of marks along the x axis."""
FEW_POINTS = 40
"""Up to this many points of a line also get a marker: a single point has no line."""
PLOT_PIXELS = 470
"""Least width of a chart between its axes."""
LETTER_PIXELS = 7
"""Largest width of a letter in a phase's name."""
ROW_PIXELS = 14
"""Height of a row of phase names above a chart."""
SHARES = ".3~p"
LARGE_COUNTS = "~s"
"""Formats 12k and 3.4G. Numbers below 1 would become 800m."""
NUMBERS = ".4~g"
"""Format of numbers, in d3's notation."""


def x_axis(runs: list[RunFiles]) -> str:
    """Returns `tokens` if several runs are compared and all know their tokens, else `step`."""
    return "tokens" if len(runs) > 1 and all(run.token_knots for run in runs) else "step"


def chart_of(panel: Panel, runs: list[RunFiles]) -> Chart | None:
    """Returns the chart of a panel for all runs; None if no run has a value."""
    lines: list[Figure] = []
    for number, run in enumerate(runs):
        own = with_all_lines(panel, run.known)
        drawn = [key for key in own.lines if has(run.records, key)]
        for kind, key in enumerate(drawn):
            name = own.lines[key] if len(runs) == 1 else f"{run.name}: {own.lines[key]}"
            look = _look(number, kind, len(runs))
            if panel.overlapping:
                above = (len(runs) - number) * len(drawn) - kind - 1
                look["width"] = 1.5 + above * min(2.5, 8 / max(1, len(runs) * len(drawn) - 1))
            if panel.band and kind == 0 and all(has(run.records, edge) for edge in panel.band):
                lines += _band(run, panel.band, runs, look["color"])
            lines.append(_line(run, key, name, runs, look))
            lines += _not_finite(run, key, runs)
    if not lines:
        return None
    axes = _y_axes(panel, lines)
    lines += [mark for run in runs for mark in _marks(run, runs)]
    if panel.per_set == "loss" and len(runs) == 1:
        lines += _baselines(runs[0])
    several = sum(line.get("showlegend", True) for line in lines) > 1
    return Chart(panel.label, {"data": lines, "layout": _layout(runs, several) | axes})


def layer_charts(run: RunFiles, runs: list[RunFiles]) -> list[Chart]:
    """Returns pictures with a row per layer. A column is one logged step, or the mean of several."""
    found = []
    for key, label in LAYERS.items():
        if not has(run.records, key):
            continue
        having = [record for record in with_key(run.records, key) if "event" not in record]
        num_layers = max(len(record[key]) for record in having if record.get(key) is not None)
        table = [record.get(key) or [math.nan] * num_layers for record in having]
        size = -(-len(table) // MOST_COLUMNS)
        parts = [table[at : at + size] for at in range(0, len(table), size)]
        ends = [having[min(at + size, len(having)) - 1]["step"] for at in range(0, len(table), size)]
        # There is one more edge than columns. Each column reaches back to the previous one.
        edges = _places(run, [first_step(having), *ends], runs)
        rows = [[_mean(each[layer] for each in part) for part in parts] for layer in range(num_layers)]
        known = [value for row in rows for value in row if value is not None]
        if not known:
            continue
        low, high = (0.0, 1.0) if key == "layer_recall" else (min(known), max(known))
        of = f" · {run.name}" if len(runs) > 1 else ""
        picture = {
            "type": "heatmap", "x": edges, "y": list(range(num_layers)), "z": rows, "zmin": low, "zmax": high,
            "colorscale": "Viridis", "colorbar": {"thickness": 12},
            "hovertemplate": "layer %{y}: %{z:.3~g}<extra></extra>",
        }  # fmt: skip
        layout = _layout(runs, legend=False)
        layout["yaxis"] = {"title": {"text": "layer"}, "dtick": max(1, num_layers // 8), "zeroline": False}
        layout["hovermode"] = "closest"
        found.append(Chart(f"{label} by layer{of}", {"data": [picture], "layout": layout}))
    return found


def pictures(run: RunFiles, runs: list[RunFiles], section: str) -> list[Chart]:
    """Returns pictures of the newest record: a row per layer, a column per head or expert."""
    found = []
    for key, shown in PICTURES.items():
        tables = [record[key] for record in run.records if record.get(key) is not None]
        if not tables or shown.section != section:
            continue
        rows = [[_number(value) for value in of_layer] for of_layer in tables[-1]]
        of = f" · {run.name}" if len(runs) > 1 else ""
        form = "p" if shown.is_share else "g"
        picture = {
            "type": "heatmap", "z": rows, "zmin": 0, "colorscale": "Viridis",
            "colorbar": {"thickness": 12, "tickformat": SHARES if shown.is_share else NUMBERS},
            "hovertemplate": f"layer %{{y}}, {shown.columns} %{{x}}: %{{z:.3~{form}}}<extra></extra>",
        }  # fmt: skip
        if shown.is_share:
            picture["zmax"] = 1
        layout = {
            "height": 260, "margin": {"l": 60, "r": 20, "t": 10, "b": 40}, "hovermode": "closest",
            "xaxis": {"title": {"text": shown.columns}, "zeroline": False},
            "yaxis": {"title": {"text": "layer"}, "zeroline": False},
            "meta": "no steps",  # A separate x axis does not follow the others' zoom.
        }  # fmt: skip
        found.append(Chart(f"{shown.label}{of}", {"data": [picture], "layout": layout}))
    return found


def marks_of(run: RunFiles) -> list[tuple[int, str]]:
    """Returns (step, kind) with one mark of each kind per section of the axis. A long spike is then not a thousand
    marks."""
    width = max(1, run.last_step) / MOST_MARKS
    found = {
        (event.step // width, event.kind): event for event in reversed(run.events) if event.step is not None
    }
    return sorted((event.step, event.kind) for event in found.values() if event.step is not None)


def thin(values: list[float], most: int) -> list[int]:
    """Returns the indices to keep: all, or the least and the largest value in each section, so that no spike is
    lost."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = {0, len(values) - 1}
    parts = most // 2
    for part in range(parts):
        places = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        finite = [at for at in places if math.isfinite(values[at])]
        if len(finite) < len(places):
            kept.add(next(at for at in places if not math.isfinite(values[at])))  # keep gaps
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


# --- lines -----------------------------------------------------------------------------------------------


def _look(number: int, kind: int, runs: int) -> Figure:
    """Returns the look of a line. One run has a color for each line. Several runs have a color for each run and a dash
    for each line."""
    color, dash = (number, kind) if runs > 1 else (kind, kind // len(COLORS))
    return {"color": COLORS[color % len(COLORS)], "dash": DASHES[dash % len(DASHES)], "width": 1.6}


def _line(run: RunFiles, key: str, name: str, runs: list[RunFiles], look: Figure) -> Figure:
    steps, values = series(run.records, key)
    kept = thin(values, MOST_POINTS)
    few = sum(map(math.isfinite, values)) <= FEW_POINTS
    return {
        "type": "scatter", "mode": "lines+markers" if few else "lines", "name": html.escape(name), "line": look,
        "marker": {"size": 4}, "connectgaps": False,
        "x": _places(run, [steps[at] for at in kept], runs), "y": [_number(values[at]) for at in kept],
    }  # fmt: skip


def _band(run: RunFiles, edges: tuple[str, str], runs: list[RunFiles], color: str) -> list[Figure]:
    """Returns two invisible lines with the area between them filled. Gaps are left out, because plotly would fill
    across them."""
    found = []
    for edge in edges:
        steps, values = series(run.records, edge)
        kept = [at for at in thin(values, MOST_POINTS) if math.isfinite(values[at])]
        found.append({
            "type": "scatter", "mode": "lines", "line": {"width": 0}, "showlegend": False, "name": edge,
            "x": _places(run, [steps[at] for at in kept], runs), "y": [_number(values[at]) for at in kept],
        })  # fmt: skip
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    found[1] |= {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.13)"}
    return found


def _not_finite(run: RunFiles, key: str, runs: list[RunFiles]) -> list[Figure]:
    """Returns a red cross for each value that is not finite. A missing value is a gap."""
    values = {record["step"]: record[key] for record in run.records if record.get(key) is not None}
    bad = [step for step, value in values.items() if not math.isfinite(value)][:MOST_POINTS]
    return [_symbols(run, bad, "not finite", "x", "#c62828", runs)] if bad else []


def _baselines(run: RunFiles) -> list[Figure]:
    """Returns the losses of unigram and bigram models on the same text; the y axis ignores them."""
    found = []
    for name, loss in baselines_of(run.summary).items():
        found.append({
            "type": "scatter", "mode": "lines", "name": f"{name} model", "hoverinfo": "skip",
            "line": {"color": "#7a7a7a", "width": 1, "dash": {"unigram": "dot", "bigram": "dash"}[name]},
            "x": [first_step(run.records), run.last_step], "y": [loss] * 2,
        })  # fmt: skip
    return found


def _marks(run: RunFiles, runs: list[RunFiles]) -> list[Figure]:
    marks = marks_of(run)
    return [
        _symbols(run, [step for step, each in marks if each == kind], title, "triangle-up", color, runs)
        for kind, (title, color) in KINDS.items()
        if any(each == kind for _, each in marks)
    ]


def _symbols(
    run: RunFiles, steps: list[int], name: str, symbol: str, color: str, runs: list[RunFiles]
) -> Figure:
    return {
        "type": "scatter", "mode": "markers", "name": name, "showlegend": False, "yaxis": "y2",
        "x": _places(run, steps, runs), "y": [0.02] * len(steps), "cliponaxis": False,
        "marker": {"symbol": symbol, "color": color, "size": 8}, "hovertemplate": name + "<extra></extra>",
    }  # fmt: skip


def _places(run: RunFiles, steps: list[int], runs: list[RunFiles]) -> list[float]:
    return [float(x) for x in tokens_at(run.token_knots, steps)] if x_axis(runs) == "tokens" else list(steps)


# --- axes ------------------------------------------------------------------------------------------------


def _layout(runs: list[RunFiles], legend: bool) -> Figure:
    starts = [x for run in runs for x in _places(run, [first_step(run.records)], runs)]
    ends = [x for run in runs for x in _places(run, [run.last_step], runs)]
    low, high = min(starts), max(ends)
    high = high if high > low else low + 1
    lines = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1,
         "line": {"width": 1, "dash": "dash", "color": COLORS[number % len(COLORS)] if len(runs) > 1 else "#8b94a5"}}
        for number, run in enumerate(runs)
        for x in _places(run, [step for step, _ in run.phases[1:]], runs)
    ]  # fmt: skip
    names, rows = _phase_names(runs[0], low, high) if len(runs) == 1 else ([], 0)
    return {
        "height": 260 + ROW_PIXELS * rows, "margin": {"l": 60, "r": 20, "t": 10 + ROW_PIXELS * rows, "b": 40},
        "hovermode": "x unified", "hoverdistance": 30, "dragmode": "zoom",
        "xaxis": {
            "title": {"text": x_axis(runs), "standoff": 4}, "range": [low, high], "showgrid": False,
            "tickformat": "~s" if x_axis(runs) == "tokens" else ",d", "zeroline": False, "showline": True,
            "unifiedhovertitle": {"text": f"{x_axis(runs)} %{{x}}"},
        },
        "showlegend": legend,
        "legend": {"orientation": "h", "traceorder": "normal", "y": -0.18, "yanchor": "top", "x": 0},
        "shapes": lines, "annotations": names,
    }  # fmt: skip


def _phase_names(run: RunFiles, low: float, high: float) -> tuple[list[Figure], int]:
    """Returns phase names above the chart, each in the lowest row with room for it, and the number of rows."""
    free: list[float] = []  # end of each row's last name, in pixels
    names = []
    for step, name in run.phases:
        width = LETTER_PIXELS * len(name)
        place = PLOT_PIXELS * (step - low) / (high - low)
        begin = max(0.0, min(place, PLOT_PIXELS - width))
        row = next((row for row, end in enumerate(free) if end <= begin), len(free))
        free[row : row + 1] = [begin + width + LETTER_PIXELS]
        names.append({
            "text": html.escape(name), "xref": "x", "x": step, "yref": "paper", "y": 1, "yanchor": "bottom",
            "yshift": ROW_PIXELS * row, "xanchor": "left" if begin == place else "right", "showarrow": False,
            "font": {"size": 11, "color": "#5c6577"},
        })  # fmt: skip
        if begin < place:  # too close to the right edge: align the name's end with the edge
            names[-1]["x"] = high
    return names, len(free)


def _y_axes(panel: Panel, lines: list[Figure]) -> Figure:
    drawn = [line for line in lines if line.get("yaxis") != "y2"]
    values = [value for line in drawn for value in line["y"] if value is not None]
    top = max([0.0, *values])
    form = SHARES if panel.scale in ("share", "percent") else NUMBERS
    if panel.scale == "count" and top >= 1000:
        form = LARGE_COUNTS
    own: Figure = {"gridcolor": "#e8ebf0", "zeroline": False, "hoverformat": form}
    if panel.scale != "log":
        own["tickformat"] = form
    if panel.scale == "share":
        own["range"] = [min([-0.02, *values]), max([1.02, *values])]
    elif panel.scale in ("percent", "count"):
        own["range"] = [min([0.0, *values]), 1.05 * top or (0.01 if panel.scale == "percent" else 1)]
    elif panel.scale == "log" and any(value > 0 for value in values):
        own |= {"type": "log", "dtick": "D2" if _decades(values) < 2 else 1, "exponentformat": "power"}
    elif shown := shown_range([(line["x"], line["y"]) for line in drawn]):
        own["range"] = list(shown)
    marks = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return {"yaxis": own, "yaxis2": marks}


def _decades(values: list[float]) -> float:
    positive = [value for value in values if value > 0]
    return math.log10(max(positive) / min(positive))


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _mean(values: Any) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{statistics.fmean(finite):.3g}") if finite else None
