"""Draw an evaluation's results as PNG files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gsa_eval.perplexity import exp

DEPTHS = 10
"""Number of rows of the needle's picture."""
HARNESS_SCORES = ("acc,none", "acc_norm,none", "exact_match,none")
SCORES = ("accuracy", "length_normalised_accuracy")


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the plots that have results, and return their paths."""
    written = []
    ruler = results.get("ruler", {})
    if texts := results.get("data"):
        written.append(_perplexity_by_position(texts, folder / "perplexity_by_position.png"))
    if needles := ruler.get("needles"):
        written.append(_needles(needles, folder / "needle.png"))
    if ruler:
        written.append(_ruler(ruler, folder / "ruler.png"))
    if bars := task_bars(results):
        written.append(_bars(bars, folder / "tasks.png"))
    return written


def task_bars(results: dict[str, Any]) -> dict[str, float]:
    """Returns a dict task and score -> value from 0 to 1, for request files and lm-evaluation-harness."""
    found = {
        f"{task}: {key.replace('_', ' ')}": each[key]
        for task, each in results.get("requests", {}).items()
        for key in SCORES
        if key in each
    }
    for task, scores in results.get("tasks", {}).get("results", {}).items():
        known = [key for key in HARNESS_SCORES if isinstance(scores.get(key), float)]
        found |= {f"{task}: {key.partition(',')[0]}": scores[key] for key in known}
    return found


def _perplexity_by_position(texts: dict[str, Any], path: Path) -> Path:
    figure, ax = _figure(7, 4)
    tops = sorted({place["to"] for each in texts.values() for place in each["loss_by_position"]})
    for name, each in texts.items():
        places = each["loss_by_position"]
        perplexities = [exp(place["loss"]) for place in places]
        ax.plot([place["to"] for place in places], perplexities, "o-", label=name)
    ax.set(xlabel="tokens that the model sees, up to", ylabel="perplexity")
    ax.set_xscale("log", base=2)
    ax.set_xticks(tops, [f"{top:,}" for top in tops])
    ax.legend(frameon=False)
    return _save(figure, path)


def _needles(needles: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the mean score by length and depth of a needle, over all tasks with a single needle."""
    lengths = sorted({each["tokens"] for each in needles})
    sums, counts = np.zeros((DEPTHS, len(lengths))), np.zeros((DEPTHS, len(lengths)))
    for each in needles:
        place = min(int(each["depth"] * DEPTHS), DEPTHS - 1), lengths.index(each["tokens"])
        sums[place] += each["score"]
        counts[place] += 1
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    depths = [f"{100 * row // DEPTHS}-{100 * (row + 1) // DEPTHS}%" for row in range(DEPTHS)]
    figure, ax = _figure(2.5 + 0.9 * len(lengths), 5)
    _heat_map(figure, ax, means, depths, [f"{length:,}" for length in lengths])
    ax.set(xlabel="tokens of the prompt", ylabel="depth of the needle", title="Needle found (%)")
    return _save(figure, path)


def _ruler(found: dict[str, Any], path: Path) -> Path:
    lengths = list(found["scores"])
    rows = [*found["tasks"], "mean"]
    values = [[found["scores"][length][task] for length in lengths] for task in found["tasks"]]
    values.append([found["mean"][length] for length in lengths])
    figure, ax = _figure(3.5 + 0.9 * len(lengths), 1.5 + 0.4 * len(rows))
    _heat_map(figure, ax, np.array(values), rows, [f"{int(length):,}" for length in lengths])
    ax.set(xlabel="tokens of the prompt", title="RULER (%)")
    return _save(figure, path)


def _bars(bars: dict[str, float], path: Path) -> Path:
    figure, ax = _figure(8, 1.2 + 0.35 * len(bars))
    ax.barh(list(bars), list(bars.values()), color="#1f5fa8")
    for row, value in enumerate(bars.values()):
        ax.text(value, row, f" {value:.3f}", va="center", fontsize=8)
    ax.set(xlim=(0, 1.05), xlabel="score")
    ax.invert_yaxis()
    return _save(figure, path)


def _heat_map(figure: Figure, ax: Axes, values: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    image = ax.imshow(values, aspect="auto", vmin=0, vmax=100, cmap="viridis")
    figure.colorbar(image, ax=ax)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value < 60 else "black"
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure without pyplot, which would need a display and global state."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path
