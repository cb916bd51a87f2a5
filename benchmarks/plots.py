"""Draws the figures of the benchmarks from their JSON files; needs matplotlib, but no GPU and no torch.

    python benchmarks/plots.py [DIR] [--format svg]

long_length draws time over the length, from bench_long.json. long_union draws time over the union ratio r (the keys
that any of 32 neighbouring queries selects, divided by the keys of one query) at the greatest length. Both include a
trained model's layers if bench_long_trained.json exists. gsa draws the time of the whole training operation divided by
dense attention's, from bench_gsa.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

RESULTS = Path(__file__).resolve().parent / "results"
COLORS = {
    "torch cuDNN": "#1f5fa8",
    "torch flash": "#7a7a7a",
    "GSA token": "#d1661f",
    "GSA token selected": "#8a4fa3",
}
TRAINED_COLOR = "#111111"
R = 4
"""Union ratio of the random selections that are drawn over the length."""
PARTS = {"forward_ms": "forward (ms)", "both_ms": "forward + backward (ms)"}

Rows = list[dict[str, Any]]


def draw_length(content: dict[str, Any], trained: dict[str, Any] | None = None) -> Figure:
    """Draw a panel for each shape and part, with a line for each kind of attention."""
    rows = [row for row in attention_rows(content) if row["attention"] != "GSA token" or row["r"] == R]
    figure, panels = _panels(rows, f"One layer's attention over the length · {_machine(content)}")
    for (shape, part), ax in panels.items():
        for name, mine in _by_attention(rows, shape).items():
            label = f"{name}, r = {R}" if name == "GSA token" else name
            _line(ax, [(row["length"], row[part]) for row in mine], label, COLORS.get(name, "black"))
        _stars(ax, [(row["length"], row[part]) for row in trained_layers(trained, shape)])
        _log_axes(ax, sorted({row["length"] for row in rows}), _thousands)
        ax.set_xlabel("tokens")
    _legend(figure, panels)
    return figure


def draw_union(content: dict[str, Any], trained: dict[str, Any] | None = None) -> Figure:
    """Draw a panel for each shape and part at the greatest length; rows without r are horizontal lines."""
    rows = attention_rows(content)
    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    title = f"One layer's attention over the union ratio, {_thousands(longest)} tokens"
    figure, panels = _panels(rows, f"{title} · {_machine(content)}")
    for (shape, part), ax in panels.items():
        for name, mine in _by_attention(rows, shape).items():
            color = COLORS.get(name, "black")
            if mine[0]["r"] is None:
                ax.axhline(mine[0][part], color=color, linestyle="--", label=name)
            else:
                _line(ax, [(row["r"], row[part]) for row in mine], name, color)
        stars = [row for row in trained_layers(trained, shape) if row["length"] == longest]
        _stars(ax, [(row["r"], row[part]) for row in stars])
        _log_axes(ax, [1, 2, 4, 8], _plain)
        ax.set_xlabel("r: keys of 32 queries' union / keys of one")
    _legend(figure, panels)
    return figure


def draw_gsa(content: dict[str, Any]) -> Figure:
    """Draw GSA's forward + backward with the indexer loss, divided by dense attention's, per shape."""
    rows = [row for row in content["rows"] if "ratio" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    figure.suptitle(f"GSA training operation over cuDNN's dense attention · {_machine(content)}", fontsize=12)
    panels = {}
    for column, shape in enumerate(shapes):
        ax = panels[shape, "ratio"] = _style(figure.add_subplot(1, len(shapes), column + 1))
        for batch, color in zip(sorted({row["batch"] for row in rows}), COLORS.values(), strict=False):
            for mode, style in (("graph", "-"), ("eager", ":")):
                mine = [r for r in rows if (r["shape"], r["batch"], r["mode"]) == (shape, batch, mode)]
                points = [(row["length"], row["ratio"]) for row in mine]
                _line(ax, points, f"batch {batch}, {mode}", color, style)
        ax.axhline(1, color="#555555", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_xticks(sorted({row["length"] for row in rows}))
        ax.xaxis.set_major_formatter(FuncFormatter(_thousands))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_ylim(bottom=0)
        ax.set_title(shape, fontsize=10)
        ax.set_xlabel("tokens")
    panels[shapes[0], "ratio"].set_ylabel("GSA / dense")
    _legend(figure, panels)
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "long_length": (("bench_long.json", "bench_long_trained.json"), draw_length),
    "long_union": (("bench_long.json", "bench_long_trained.json"), draw_union),
    "gsa": (("bench_gsa.json",), draw_gsa),
}
"""Maps a figure's name to its files (only the first must exist) and the function that draws their contents."""


def attention_rows(content: dict[str, Any]) -> Rows:
    """Return the rows of whole attentions; a file also has rows of parts, memory and checks."""
    return [row for row in content["rows"] if "attention" in row and "both_ms" in row]


def trained_layers(content: dict[str, Any] | None, shape: str) -> Rows:
    rows = attention_rows(content) if content else []
    return [row for row in rows if row["shape"] == shape and row["attention"].startswith("GSA layer")]


def _panels(rows: Rows, title: str) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels = {}
    for line, (part, label) in enumerate(PARTS.items()):
        for column, shape in enumerate(shapes):
            ax = _style(figure.add_subplot(len(PARTS), len(shapes), line * len(shapes) + column + 1))
            ax.set_title(shape, fontsize=10)
            ax.set_ylabel(label)
            panels[shape, part] = ax
    return figure, panels


def _style(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _by_attention(rows: Rows, shape: str) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        if row["shape"] == shape:
            found.setdefault(row["attention"], []).append(row)
    return found


def _line(
    ax: Axes, points: list[tuple[float, float | None]], name: str, color: str, style: str = "-"
) -> None:
    drawn = sorted((x, y) for x, y in points if y is not None)
    if drawn:
        ax.plot(*zip(*drawn, strict=True), style, color=color, label=name, marker="o", markersize=4)


def _stars(ax: Axes, points: list[tuple[float, float]]) -> None:
    if points:
        ax.plot(*zip(*points, strict=True), "*", color=TRAINED_COLOR, label="a trained model's layers")


def _log_axes(ax: Axes, ticks: list[float], text: Callable[[float, int | None], str]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(FuncFormatter(text))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, panels: dict[tuple[str, str], Axes]) -> None:
    entries: dict[str, Any] = {}
    for ax in panels.values():
        entries |= {name: line for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3, frameon=False)


def _thousands(value: float, _: int | None = None) -> str:
    return f"{value / 1024:g}K"


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:g}"


def _machine(content: dict[str, Any]) -> str:
    about = content["environment"]
    return f"{about['gpu']}, commit {about['commit']}"


def write_plots(folder: Path, suffix: str = "png") -> list[Path]:
    """Write one file for each figure whose JSON file is in `folder`."""
    written = []
    for name, (sources, draw) in FIGURES.items():
        found = [folder / source for source in sources if (folder / source).is_file()]
        if folder / sources[0] in found:
            contents = [json.loads(path.read_text(encoding="utf-8")) for path in found]
            path = folder / f"{name}.{suffix}"
            draw(*contents).savefig(path)
            written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--format", choices=["png", "svg"], default="png")
    arguments = parser.parse_args()
    written = write_plots(arguments.folder, arguments.format)
    if not written:
        names = ", ".join(sorted({sources[0] for sources, _ in FIGURES.values()}))
        print(f"{arguments.folder} has none of {names}; run the benches first", file=sys.stderr)
        return 1
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
