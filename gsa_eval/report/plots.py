"""Draw figures of a run from its metrics.jsonl alone: during the run, after the run, or after a kill."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from gsa_data.faults import printable
from gsa_eval.report.run_files import baselines_of, read_summary
from gsa_eval.report.run_series import (
    first_step,
    flat,
    has,
    known_of,
    names_of,
    phase_starts,
    records_of,
    series,
    shown_range,
    token_knots,
    tokens_at,
    with_all_lines,
    with_key,
)
from gsa_train.files import write_atomically
from gsa_train.metrics.panels import LAYERS, PANELS, TITLES, Panel
from gsa_train.metrics.progress import compact
from gsa_train.metrics.record_format import Record

COLORS = ("#1f5fa8", "#d1661f", "#3b8c4f", "#8a4fa3", "#7a7a7a")
STYLES = ("-", "--", ":", "-.")
FEW_POINTS = 40
"""Up to this many points of a line also get a marker: a single point has no line."""


def write_plots(run_dir: Path) -> list[Path]:
    """Write `plots/*.png`, one per figure that has data, and return their paths."""
    records = [flat(record) for record in records_of(run_dir)]
    known = known_of(records)
    out_dir = run_dir / "plots"
    out_dir.mkdir(exist_ok=True)
    written = []
    for name, title in TITLES.items():
        panels = [with_all_lines(panel, known) for panel in PANELS if panel.figure == name]
        panels = [panel for panel in panels if any(has(records, key) for key in panel.lines)]
        if not panels:
            continue
        figure, axes = _figure(f"{title} · {run_dir.name}", len(panels))
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, records)
        if name == "loss":
            _draw_baselines(axes[0], run_dir)
            _draw_non_finite(axes[0], records)
        written.append(_finish(figure, axes, records, out_dir / f"{name}.png"))
    layers = [(key, label) for key, label in LAYERS.items() if has(records, key)]
    if layers:
        figure, axes = _figure(f"Layers · {run_dir.name}", len(layers))
        for ax, (key, label) in zip(axes, layers, strict=True):
            _draw_layers(figure, ax, key, label, records)
        written.append(_finish(figure, axes, records, out_dir / "layers.png"))
    return written


def write_comparison(run_dirs: list[Path], out_dir: Path, name: str = "comparison.png") -> Path:
    """Draw training and validation loss of several runs over the tokens they have seen."""
    runs = {name: records_of(run) for name, run in names_of(run_dirs).items()}
    panels = []
    for key, label in (("loss", "train loss"), ("validation_loss", "validation loss")):
        lines: dict[str, Line] = {}
        for run, records in runs.items():
            steps, values = series(records, key)
            knots = token_knots(records)
            lines[run] = (tokens_at(knots, steps), values) if steps and knots else ([], [])
        if any(has(records, key) for records in runs.values()):
            panels.append(Curves(f"{label} (nats per token)", lines, "tokens", counts=True))
    return write_curves(panels, "Comparison over tokens", out_dir / name)


Line = tuple[Sequence[float], list[float]]
"""x and y of a line's points."""


@dataclass(frozen=True)
class Curves:
    y_label: str
    lines: Mapping[str, Line]
    """In the order of the legend. An empty line also takes a color, so that a run has the same color in all panels."""
    x_label: str
    counts: bool = False
    """Whether x counts tokens, up to millions."""
    later: bool = False
    """Whether y has the range of `shown_range`, which ignores the first steps, instead of the range of all values."""


def write_curves(panels: Sequence[Curves], title: str, path: Path) -> Path:
    """Draw the panels, one below the other."""
    figure, axes = _figure(title, max(1, len(panels)))
    for ax, panel in zip(axes, panels, strict=False):
        for index, (name, (x, y)) in enumerate(panel.lines.items()):
            if y:
                _plot(ax, x, y, name, *_line_look(index))
        ax.set_ylabel(panel.y_label)
        ax.set_xlabel(panel.x_label)
        ax.set_xlim(left=0)
        if panel.counts:
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    # One legend serves all panels, because a run looks the same in each.
    looks = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if len(looks) > 1:
        order = [label for label in map(_words, panels[0].lines) if label in looks]
        figure.legend([looks[label] for label in order], order, frameon=False, loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path)


# --- drawing: figures without pyplot need no display and leave no global state --------------------------


def _words(text: str) -> str:
    """Escape text for matplotlib, which reads formulas between dollars, and hides labels that begin with _."""
    return f"{' ' * text.startswith('_')}{printable(text)}".replace("$", r"\$")


def _figure(title: str, rows: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, 1.5 + 2.7 * rows), dpi=120, layout="constrained")
    figure.suptitle(_words(title), fontsize=13, fontweight="bold")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, axes


def _draw(ax: Axes, panel: Panel, records: list[Record]) -> None:
    drawn = [(name, series(records, key)) for key, name in panel.lines.items() if has(records, key)]
    values = [value for _, (_, ys) in drawn for value in ys if math.isfinite(value)]
    if panel.scale == "log" and any(value > 0 for value in values):
        ax.set_yscale("log", nonpositive="mask")
    for index, (name, (steps, ys)) in enumerate(drawn):
        width = 1.5 + 2.5 * (len(drawn) - 1 - index) if panel.overlapping else 1.5
        _plot(ax, steps, ys, name, *_line_look(index), width)
    if panel.scale == "linear" and (shown := shown_range([line for _, line in drawn])):
        ax.set_ylim(*shown)
    if panel.band and all(has(records, key) for key in panel.band):
        both = [
            record
            for record in records
            if all((record.get(edge) is None) == (record.get(panel.band[0]) is None) for edge in panel.band)
        ]
        (steps, low), (_, high) = series(both, panel.band[0]), series(both, panel.band[1])
        ax.fill_between(steps, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="min to max")
    if panel.scale == "share":
        ax.set_ylim(-0.02, 1.02)
    if panel.scale == "percent":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.scale == "count":
        ax.set_ylim(bottom=0, top=None if any(values) else 1)
        if max(values, default=0) >= 1000:  # smaller numbers would be 800m
            ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_ylabel(panel.label)
    _legend(ax)


def _legend(ax: Axes) -> None:
    """Draw a legend beside the axes. A single line needs none, because the y axis has its name."""
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _line_look(index: int) -> tuple[str, str]:
    return COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]


def _plot(
    ax: Axes, x: Sequence[float], y: list[float], name: str, color: str, style: str = "-", width: float = 1.5
) -> None:
    marker = "o" if sum(map(math.isfinite, y)) <= FEW_POINTS else ""
    ax.plot(x, y, style, color=color, label=_words(name), linewidth=width, marker=marker, markersize=3)


def _draw_non_finite(ax: Axes, records: list[Record]) -> None:
    """Draw a red cross on the x axis for every step with a non-finite loss."""
    bad = [r["step"] for r in records if r.get("loss") is not None and not math.isfinite(r["loss"])]
    if bad:
        transform = ax.get_xaxis_transform()
        ax.plot(bad, [0] * len(bad), "x", color="red", transform=transform, clip_on=False, label="not finite")
        _legend(ax)


def _draw_baselines(ax: Axes, run_dir: Path) -> None:
    for name, loss in baselines_of(read_summary(run_dir)).items():
        ax.axhline(loss, color=COLORS[-1], linestyle={"unigram": ":", "bigram": "--"}[name], label=name)
    _legend(ax)


def _draw_layers(figure: Figure, ax: Axes, key: str, label: str, records: list[Record]) -> None:
    """Draw a row per layer. The column of a record reaches back to the previous record."""
    having = [record for record in with_key(records, key) if "event" not in record]
    num_layers = max(len(record[key]) for record in having if record.get(key) is not None)
    rows = (record.get(key) or [None] * num_layers for record in having)
    table = [[math.nan if value is None else value for value in row] for row in rows]
    columns = list(zip(*table, strict=True))
    edges = [first_step(having), *(record["step"] for record in having)]
    mesh = ax.pcolormesh(edges, [i - 0.5 for i in range(num_layers + 1)], columns, cmap="viridis")
    if key == "layer_recall":
        mesh.set_clim(0, 1)
    figure.colorbar(mesh, ax=ax, label=label, pad=0.01)
    ax.set_ylabel("layer")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.grid(False)


def _finish(figure: Figure, axes: list[Axes], records: list[Record], path: Path) -> Path:
    """Draw phases as vertical lines with names on top, steps and tokens at the bottom, and write the file."""
    starts = phase_starts(records)
    for ax in axes:
        for step, _ in starts[1:]:
            ax.axvline(step, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_xlim(starts[0][0], max(record["step"] for record in records))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.tick_params(labelbottom=ax is axes[-1])
    for step, phase in starts:
        transform = axes[0].get_xaxis_transform()
        axes[0].text(step, 1.0, _words(phase), transform=transform, rotation=35, fontsize=8, color="#555555")
    knots = token_knots(records)
    if knots:
        text = FuncFormatter(lambda step, _: f"{step:,.0f}\n{compact(tokens_at(knots, [step])[0])}")
        axes[-1].xaxis.set_major_formatter(text)
    axes[-1].set_xlabel("step, and tokens seen" if knots else "step")
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomically(path, content.getvalue())
    return path
