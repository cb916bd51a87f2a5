"""Draw the attention of a model on one text (attention_record.py) as PNG files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from gsa_eval.attention_record import GATE_BINS, AttentionRecord, Gate, HeadMaps

CELLS = 256
"""Cells along a map's side. With more tokens, a cell is the mean of several tokens."""
SPELLED_TOKENS = 40
"""Largest number of tokens written along a map's axes."""
NUMBERED_CELLS = 96
"""Largest table of layers and heads in which each cell has its number written."""
LEAST_WEIGHT = 1e-4
"""Smaller weights get the color of this weight."""
BLUE = "#1f5fa8"
NOT_SELECTED = "#dcdfe4"


def write_pictures(
    record: AttentionRecord, place: str, tokens: Sequence[str], about: str, folder: Path
) -> list[str]:
    """Write the pictures and return their names: attention.png and sink.png, and gates.png and keys.png if they apply.

    Args:
        place: layer and head of the maps.
        about: name of the model and the text, for the titles.
    """
    assert record.maps is not None
    figures = {
        "attention.png": draw_maps(record.maps, tokens, f"Attention of {place}\n{about}"),
        "sink.png": draw_sink(record, f"Attention on the first token\n{about}"),
    }
    gates = {"G1 (output gate)": record.output_gates, "G2 (value gate)": record.value_gates}
    if present := {name: found for name, found in gates.items() if found}:
        figures["gates.png"] = draw_gates(present, f"Gates: 0 is shut, 1 is open\n{about}")
    if any(each is not None for each in record.keys):
        figures["keys.png"] = draw_keys(record.keys, f"Selected keys by position\n{about}")
    for name, figure in figures.items():
        figure.savefig(folder / name)
    return [*figures]


# --- one head --------------------------------------------------------------------------------------------


def draw_maps(maps: HeadMaps, tokens: Sequence[str], title: str) -> Figure:
    """Draw the attention of a dense layer over all keys. For a sparse layer, also draw the indexer's scores, and the
    selected keys with their weights."""
    length = len(maps.weights)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    side = -(-length // CELLS)
    figure, axes = _figure(
        title, (19, 6.4) if maps.selected is not None else (8.2, 7.6), 1 if maps.selected is None else 3
    )
    weight = LogNorm(LEAST_WEIGHT, 1)
    panels: list[tuple[str, Any, Any, str]] = [
        ("What the head attends to", weight, pooled(maps.full, visible, side), "attention weight")
    ]
    if maps.selected is not None and maps.scores is not None:
        budget = maps.selected.sum(-1)
        recall = (
            "all keys are selected"
            if maps.recall is None
            else f"they have {maps.recall:.0%} of the attention"
        )
        panels = [
            ("Attention over all keys", weight, panels[0][2], "attention weight, if all keys were selected"),
            (
                f"Scores of layer {maps.indexer_layer}'s indexer",
                Normalize(*_range(maps.scores[visible])),
                pooled(maps.scores, visible, side),
                "score",
            ),
            (
                f"Selected keys, {int(budget.min()):,} to {int(budget.max()):,} a query:\n{recall}",
                weight,
                pooled(maps.weights, visible, side, maps.selected),
                "attention weight (grey: not selected)",
            ),
        ]
    for ax, (name, norm, values, meaning) in zip(axes, panels, strict=True):
        colors = matplotlib.colormaps["viridis"].with_extremes(bad="white")
        edges = (-0.5, length - 0.5, length - 0.5, -0.5)
        if values is panels[-1][2] and maps.selected is not None:
            grey = pooled(torch.full((length, length), 0.5), visible, side)
            ax.imshow(grey, cmap=matplotlib.colors.ListedColormap([NOT_SELECTED]), extent=edges)
            colors = colors.with_extremes(bad=(0, 0, 0, 0))
        if isinstance(norm, LogNorm):
            values = np.maximum(values, LEAST_WEIGHT)
        image = ax.imshow(values, cmap=colors, norm=norm, extent=edges, interpolation="nearest")
        figure.colorbar(image, ax=ax, label=meaning, fraction=0.046, pad=0.03)
        ax.set_title(name + (f"\na cell is the mean of {side} x {side}" if side > 1 else ""), fontsize=11)
        ax.set_xlabel("key: its position in the text")
        ax.set_ylabel("query: its position in the text" if ax is axes[0] else "")
        _label_tokens(ax, tokens)
    return figure


def pooled(values: torch.Tensor, counted: torch.Tensor, side: int, shown: torch.Tensor | None = None) -> Any:
    """Returns the mean of the counted values in each `side` x `side` square: [ceil(L / side)] * 2.

    A square is masked if none of its values is shown.

    Args:
        values, counted: [L, L]
        shown: bool [L, L]; None: `counted`.
    """
    more = -len(values) % side

    def sums(each: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(each.double(), (0, more, 0, more))
        return padded.unflatten(1, (-1, side)).unflatten(0, (-1, side)).sum((1, 3))

    means = sums(torch.where(counted, values, 0)) / sums(counted).clamp(min=1)
    hidden = sums(counted if shown is None else shown) == 0
    return np.ma.masked_array(means.numpy(), hidden.numpy())


def _range(values: torch.Tensor) -> tuple[float, float]:
    """Returns low and high, which differ even if all values are equal."""
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1e-6


def _label_tokens(ax: Axes, tokens: Sequence[str]) -> None:
    if len(tokens) > SPELLED_TOKENS:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        return
    names = [_printable(token) for token in tokens]
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xlabel("key")
    ax.set_ylabel("query" if ax.get_ylabel() else "")


def _printable(token: str) -> str:
    """Make white space visible, and escape dollars, which matplotlib reads as formulas."""
    shown = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5").replace("$", r"\$")
    return shown if shown.isprintable() else repr(token)[1:-1]


# --- all layers and heads ----------------------------------------------------------------------------------


def draw_sink(record: AttentionRecord, title: str) -> Figure:
    """Draw a table of layers and heads, and the mean of each layer."""
    shares = np.array(record.sink)
    figure, (table, bars) = _figure(
        title, _size_of_table(len(shares), shares.shape[1], beside=4.5), 2, [3, 2]
    )
    _draw_table(figure, table, shares, "head", "share of attention", percent=True)
    table.set_title(
        f"By layer and head: mean over queries that see at least {record.least_keys} keys", fontsize=11
    )
    bars.barh(range(len(shares)), shares.mean(1), color=BLUE)
    bars.invert_yaxis()
    bars.set_ylim(table.get_ylim())
    bars.yaxis.set_major_locator(MaxNLocator(integer=True))
    bars.xaxis.set_major_locator(MaxNLocator(nbins=5))
    bars.xaxis.set_major_formatter(PercentFormatter(1.0))
    bars.set_xlabel("share of attention")
    bars.set_title(f"Mean of the heads; of all layers {shares.mean():.1%}", fontsize=11)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def draw_gates(gates: dict[str, list[Gate]], title: str) -> Figure:
    """Draw for each gate a table of layers and heads, and a histogram of its openings."""
    layers, heads = len(next(iter(gates.values()))), max(len(found[0].means) for found in gates.values())
    width, height = _size_of_table(layers, heads, beside=4.5)
    figure = Figure(figsize=(width, 0.6 + height * len(gates)), dpi=110, layout="constrained")
    _write_title(figure, title)
    axes: NDArray[Any] = figure.subplots(len(gates), 2, squeeze=False, width_ratios=[3, 2])
    edges = np.linspace(0, 1, GATE_BINS + 1)
    for (table, bars), (name, found) in zip(axes, gates.items(), strict=True):
        means = np.array([each.means for each in found])
        heads_of = "head" if name.startswith("G1") else "key-value head"
        _draw_table(figure, table, means, heads_of, "mean opening", norm=Normalize(0, 1))
        table.set_title(f"{name}: mean by layer and head", fontsize=11)
        counts = np.array([each.histogram for each in found], dtype=float).sum(0)
        bars.bar(
            edges[:-1],
            counts / counts.sum(),
            width=np.diff(edges),
            align="edge",
            color=BLUE,
            edgecolor="white",
        )
        bars.set_xlim(0, 1)
        bars.yaxis.set_major_formatter(PercentFormatter(1.0))
        bars.set_xlabel("opening")
        bars.set_ylabel("share of channels and tokens")
        bars.set_title(f"{name}: all layers, mean {means.mean():.3f}", fontsize=11)
        bars.spines[["top", "right"]].set_visible(False)
    return figure


def draw_keys(keys: Sequence[list[int] | None], title: str) -> Figure:
    """Draw the mean number of selected keys over the sparse layers, its range, and the number of causal keys."""
    table = np.array([each for each in keys if each is not None])
    figure, (ax,) = _figure(title, (11, 5), 1)
    positions = np.arange(table.shape[1])
    ax.plot(positions, positions + 1, "--", color="#7a7a7a", label="keys that the query sees")
    ax.fill_between(
        positions,
        table.min(0),
        table.max(0),
        color=BLUE,
        alpha=0.2,
        linewidth=0,
        label="layers, least to most",
    )
    ax.plot(positions, table.mean(0), color=BLUE, label="selected keys, mean of the layers")
    ax.set_ylim(0, min(1.6 * table.max(), 1.05 * len(positions)))
    ax.set_xlim(0, len(positions) - 1)
    ax.set_xlabel("query: its position in the text")
    ax.set_ylabel("keys")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _figure(
    title: str, size: tuple[float, float], columns: int, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    _write_title(figure, title)
    axes: NDArray[Any] = figure.subplots(1, columns, squeeze=False, width_ratios=widths)
    return figure, list(axes[0])


def _write_title(figure: Figure, title: str) -> None:
    first, _, about = title.partition("\n")
    width = int(11 * figure.get_size_inches()[0])  # characters of this size
    figure.suptitle(first, fontsize=13, fontweight="bold")
    figure.supxlabel(textwrap.fill(about, width), fontsize=10)


def _size_of_table(layers: int, heads: int, beside: float) -> tuple[float, float]:
    return min(20.0, max(7.0, 2 + 0.45 * heads) + beside), min(9.0, max(3.8, 1.8 + 0.3 * layers))


def _draw_table(
    figure: Figure,
    ax: Axes,
    values: NDArray[Any],
    columns: str,
    meaning: str,
    norm: Normalize | None = None,
    percent: bool = False,
) -> None:
    norm = norm or Normalize(0, max(float(values.max()), 1e-6))
    image = ax.imshow(values, cmap="viridis", norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=ax, label=meaning, pad=0.02)
    if percent:
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(columns)
    ax.set_ylabel("layer")
    if values.size <= NUMBERED_CELLS:
        for (row, column), value in np.ndenumerate(values):
            text = f"{value:.1%}" if percent else f"{value:.2f}"
            color = "black" if norm(value) > 0.6 else "white"
            ax.text(column, row, text, ha="center", va="center", fontsize=9, color=color)
