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

SPELLED_TOKENS = 40
"""Largest number of tokens written along a map's axes."""
LEAST_WEIGHT = 1e-4
"""Smaller weights get the color of this weight."""
BLUE, GREY = "#1f5fa8", "#dcdfe4"


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


def draw_maps(maps: HeadMaps, tokens: Sequence[str], title: str) -> Figure:
    """Draw the attention of a dense layer over all keys. For a sparse layer, also draw the indexer's scores, and the
    selected keys with their weights. Keys after the query and keys that are not selected are grey."""
    visible = torch.ones(len(maps.weights), len(maps.weights), dtype=torch.bool).tril()
    weight = LogNorm(LEAST_WEIGHT, 1, clip=True)
    panels: list[tuple[str, Normalize, torch.Tensor, torch.Tensor]] = [
        ("attention weight over all keys", weight, maps.full, visible)
    ]
    if maps.selected is not None and maps.scores is not None:
        budget = maps.selected.sum(-1)
        kept = "all keys are selected" if maps.recall is None else f"{maps.recall:.0%} of the attention"
        of_selected = (
            f"attention weight of the selected keys,\n{budget.min()} to {budget.max()} a query: {kept}"
        )
        low, high = float(maps.scores[visible].min()), float(maps.scores[visible].max())
        panels += [
            (f"scores of layer {maps.indexer_layer}'s indexer", Normalize(low, high), maps.scores, visible),
            (of_selected, weight, maps.weights, maps.selected),
        ]
    figure, (axes,) = _figure(title, (8.2 if len(panels) == 1 else 19.0, 7.0), 1, len(panels))
    for ax, (name, norm, values, shown) in zip(axes, panels, strict=True):
        colors = matplotlib.colormaps["viridis"].with_extremes(bad=GREY)
        hidden = np.ma.masked_array(values.numpy(), ~shown.numpy())
        figure.colorbar(ax.imshow(hidden, cmap=colors, norm=norm), ax=ax, fraction=0.046, pad=0.03)
        ax.set_title(name, fontsize=11)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        if len(tokens) <= SPELLED_TOKENS:
            names = [_printable(token) for token in tokens]
            ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
            ax.set_yticks(range(len(names)), names, fontsize=8)
    return figure


def _printable(token: str) -> str:
    """Make white space visible, and escape dollars, which matplotlib reads as formulas."""
    shown = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5").replace("$", r"\$")
    return shown if shown.isprintable() else repr(token)[1:-1]


def draw_sink(record: AttentionRecord, title: str) -> Figure:
    shares = np.array(record.sink)
    figure, ((ax,),) = _figure(title, (9.0, 6.0))
    _draw_table(figure, ax, shares, "head", Normalize(0, max(float(shares.max()), 1e-6)))
    ax.set_title(
        f"share of attention, mean over queries that see at least {record.least_keys} keys; all layers: "
        f"{shares.mean():.1%}",
        fontsize=11,
    )
    return figure


def draw_gates(gates: dict[str, list[Gate]], title: str) -> Figure:
    """Draw for each gate a table of layers and heads, and a histogram of its openings."""
    figure, axes = _figure(title, (14.0, 5.0 * len(gates)), len(gates), 2)
    edges = np.linspace(0, 1, GATE_BINS + 1)
    for (table, bars), (name, found) in zip(axes, gates.items(), strict=True):
        means = np.array([each.means for each in found])
        heads_of = "head" if name.startswith("G1") else "key-value head"
        _draw_table(figure, table, means, heads_of, Normalize(0, 1))
        table.set_title(f"{name}: mean opening by layer and head", fontsize=11)
        counts = np.array([each.histogram for each in found], dtype=float).sum(0)
        bars.stairs(counts / counts.sum(), edges, fill=True, color=BLUE)
        bars.yaxis.set_major_formatter(PercentFormatter(1.0))
        bars.set_xlabel("opening")
        bars.set_ylabel("share of channels and tokens")
        bars.set_title(f"{name}: all layers, mean {means.mean():.3f}", fontsize=11)
    return figure


def draw_keys(keys: Sequence[list[int] | None], title: str) -> Figure:
    """Draw the mean number of selected keys over the sparse layers, its range, and the number of causal keys."""
    table = np.array([each for each in keys if each is not None])
    figure, ((ax,),) = _figure(title, (11.0, 5.0))
    positions = np.arange(table.shape[1])
    ax.plot(positions, positions + 1, "--", color="#7a7a7a", label="causal keys")
    ax.fill_between(
        positions, table.min(0), table.max(0), color=BLUE, alpha=0.2, label="layers, least to most"
    )
    ax.plot(positions, table.mean(0), color=BLUE, label="selected keys, mean of the layers")
    ax.set_ylim(0, min(1.6 * table.max(), 1.05 * len(positions)))
    ax.set_xlabel("query: its position in the text")
    ax.set_ylabel("keys")
    ax.legend(frameon=False)
    return figure


def _figure(
    title: str, size: tuple[float, float], rows: int = 1, columns: int = 1
) -> tuple[Figure, NDArray[Any]]:
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    first, _, about = title.partition("\n")
    figure.suptitle(first, fontsize=13, fontweight="bold")
    figure.supxlabel(textwrap.fill(about, int(11 * size[0])), fontsize=10)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _draw_table(figure: Figure, ax: Axes, values: NDArray[Any], columns: str, norm: Normalize) -> None:
    image = ax.imshow(values, cmap="viridis", norm=norm, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=ax, pad=0.02)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(columns)
    ax.set_ylabel("layer")
