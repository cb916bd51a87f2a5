"""Figures of a run, drawn from its metrics.jsonl alone: during the run, after it, or after it was killed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from gsa_train.progress import compact
from gsa_train.sinks import Record, read_records, validation_prefixes

COLORS = ("#1f5fa8", "#d1661f", "#3b8c4f", "#8a4fa3", "#7a7a7a")
FEW_POINTS = 40
"""Up to this many points of a line also get a marker: a single point has no line."""


@dataclass(frozen=True)
class Panel:
    figure: str
    """Panels of the same figure stand below each other; a key of TITLES, and the name of the file."""
    label: str
    """Y axis."""
    lines: dict[str, str]
    """Key of the record -> name in the legend."""
    scale: str = "linear"
    """`linear`, `log`, `count` (from 0, as 12k), `share` (0 to 1), or `percent`."""
    band: tuple[str, str] | None = None
    """Keys of the lower and the upper edge of a shaded band."""
    per_set: str = ""
    """Score of which each validation set, or each of its sources, gets a line."""


TITLES = {
    "loss": "Loss",
    "indexer": "Indexer",
    "budget": "Keys per query",
    "selection": "Selections of neighbouring queries",
    "gates": "Gates",
    "sink": "Attention sink and activations",
    "optimizer": "Optimizer",
    "throughput": "Throughput",
}
RECALL = {"recall": "indexer", "validation_recall": "validation", "random_recall": "random choice"}
GATES = {"value_gate_mean": "value gate", "output_gate_mean": "output gate"}
LOW_GATES = {"value_gate_low": "value gate", "output_gate_low": "output gate"}
MEMORY = {"memory_allocated_bytes": "allocated", "memory_peak_bytes": "peak"}
PANELS = (
    Panel("loss", "loss (nats per token)", {"loss": "train"}, per_set="loss"),
    Panel("loss", "loss by source (nats per token)", {}, per_set="loss_by_source"),
    Panel("loss", "bits per byte", {}, per_set="bits_per_byte"),
    Panel("indexer", "KL divergence (nats)", {"indexer_kl": "indexer KL"}),
    Panel("indexer", "recall of attention mass", RECALL, "share"),
    Panel("budget", "budget k_t (keys)", {"k_mean": "mean"}, "count", band=("k_min", "k_max")),
    Panel("budget", "average score variance", {"variance_ema": "variance"}, "log"),
    Panel("selection", "keys shared with the neighbour", {"adjacent_overlap": "overlap"}, "share"),
    Panel("selection", "union of 32 queries / mean k_t", {"union_ratio_32": "union of 32"}),
    Panel("gates", "mean gate", GATES, "share"),
    Panel("gates", "gates below 0.1", LOW_GATES, "percent"),
    Panel("sink", "attention to the first token", {"first_token_attention": "first token"}, "percent"),
    Panel("sink", "largest |activation|", {"max_activation": "maximum"}, "log"),
    Panel("optimizer", "learning rate", {"lr": "lr"}, "log"),
    Panel("optimizer", "gradient norm", {"grad_norm": "gradient norm"}, "log"),
    Panel("throughput", "tokens per second", {"tokens_per_second": "tokens/s"}, "count"),
    Panel("throughput", "share", {"mfu": "MFU", "data_wait": "waiting for data"}, "percent"),
    Panel("throughput", "device memory (bytes)", MEMORY, "count"),
)
LAYERS = {"layer_recall": "recall", "layer_indexer_kl": "indexer KL", "layer_k_mean": "mean k_t"}


def write_plots(run_dir: Path) -> list[Path]:
    """Write `plots/*.png`, one per figure that has data, and return their paths."""
    records = [_flat(record) for record in read_records(run_dir / "metrics.jsonl")]
    out_dir = run_dir / "plots"
    out_dir.mkdir(exist_ok=True)
    written = []
    for name, title in TITLES.items():
        panels = [_with_all_lines(panel, records) for panel in PANELS if panel.figure == name]
        panels = [panel for panel in panels if any(_has(records, key) for key in panel.lines)]
        if not panels:
            continue
        figure, axes = _figure(f"{title} · {run_dir.name}", len(panels))
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, records)
        if name == "loss":
            _draw_baselines(axes[0], run_dir / "summary.json")
            _draw_non_finite(axes[0], records)
        written.append(_finish(figure, axes, records, out_dir / f"{name}.png"))
    layers = [(key, label) for key, label in LAYERS.items() if _has(records, key)]
    if layers:
        figure, axes = _figure(f"Layers · {run_dir.name}", len(layers))
        for ax, (key, label) in zip(axes, layers, strict=True):
            _draw_layers(figure, ax, key, label, records)
        written.append(_finish(figure, axes, records, out_dir / "layers.png"))
    return written


def write_comparison(run_dirs: list[Path], out_dir: Path) -> Path:
    """Training and validation loss of several runs over the tokens they have seen."""
    runs = {name: read_records(run / "metrics.jsonl") for name, run in _names(run_dirs).items()}
    panels = {"loss": "train loss", "validation_loss": "validation loss"}
    panels = {key: label for key, label in panels.items() if any(_has(r, key) for r in runs.values())}
    figure, axes = _figure("Comparison over tokens", max(1, len(panels)))
    for ax, (key, label) in zip(axes, panels.items(), strict=False):
        for index, (name, records) in enumerate(runs.items()):
            steps, values = series(records, key)
            tokens_per_step = _tokens_per_step(records)
            if steps and tokens_per_step:
                tokens = [step * tokens_per_step for step in steps]
                _plot(ax, tokens, values, name, *_line_look(index))
        ax.set_ylabel(f"{label} (nats per token)")
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        _legend(ax)
    axes[-1].set_xlabel("tokens")
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "comparison.png"
    figure.savefig(path)
    return path


# --- data ----------------------------------------------------------------------------------------------


def series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a key, NaN where `_with_key` leaves a gap."""
    having = _with_key(records, key)
    values = [math.nan if record.get(key) is None else float(record[key]) for record in having]
    return [record["step"] for record in having], values


def phase_starts(records: list[Record]) -> list[tuple[int, str]]:
    """(step, name): a phase starts with the last logged step before it, the first one at `_first_step`."""
    starts: list[tuple[int, str]] = []
    previous = _first_step(records)
    for record in records:
        if not starts or starts[-1][1] != record["phase"]:
            starts.append((previous, record["phase"]))
        previous = record["step"]
    return starts


def _first_step(records: list[Record]) -> int:
    """A record stands for the steps since the one before: the first starts an interval earlier."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    return max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else max(0, steps[0] - 1)


def _with_key(records: list[Record], key: str) -> list[Record]:
    """Records that have a value, and those of phases that never have one: a gap that no line may cross."""
    phases = {record["phase"] for record in records if record.get(key) is not None}
    return [record for record in records if record.get(key) is not None or record["phase"] not in phases]


def _flat(record: Record) -> Record:
    """Entries of dicts as keys of their own: `lrs: base`, `validation_loss_by_source: Wikipedia`."""
    flat: Record = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {name}": number for name, number in value.items()}
        else:
            flat[key] = value
    return flat


def _with_all_lines(panel: Panel, records: list[Record]) -> Panel:
    """A line for each learning rate, and for each validation set or source, that the records know."""
    keys = dict.fromkeys(key for record in records for key in record)
    lines = dict(panel.lines)
    if "lr" in lines:
        lines = {key: key.removeprefix("lrs: ") for key in keys if key.startswith("lrs: ")} or lines
    if panel.per_set:
        sets = {prefix: name for record in records for prefix, name in validation_prefixes(record).items()}
        for prefix, name in sets.items():
            key = f"{prefix}_{panel.per_set}"
            lines[key] = "validation" if name == "validation" else f"validation {name}"
            sources = [each for each in keys if each.startswith(f"{key}: ")]
            lines |= {each: f"{name}: {each.removeprefix(f'{key}: ')}" for each in sources}
    return replace(panel, lines=lines)


def _has(records: list[Record], key: str) -> bool:
    return any(record.get(key) is not None for record in records)


def _tokens_per_step(records: list[Record]) -> float:
    """The batch size is fixed for a run, so tokens grow evenly with steps. 0: unknown."""
    counted = [record for record in records if record.get("tokens") and record["step"]]
    return counted[-1]["tokens"] / counted[-1]["step"] if counted else 0.0


def _names(run_dirs: list[Path]) -> dict[str, Path]:
    """Folder names, or whole paths where two runs have the same."""
    names = [run.resolve().name for run in run_dirs]
    return {
        name if names.count(name) == 1 else str(run): run for name, run in zip(names, run_dirs, strict=True)
    }


# --- drawing: figures without pyplot need no display and leave no global state --------------------------


def _figure(title: str, rows: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, 1.5 + 2.7 * rows), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, axes


def _draw(ax: Axes, panel: Panel, records: list[Record]) -> None:
    drawn = [(key, name) for key, name in panel.lines.items() if _has(records, key)]
    values = [value for key, _ in drawn for value in series(records, key)[1]]
    if panel.scale == "log" and any(0 < value < math.inf for value in values):
        ax.set_yscale("log", nonpositive="mask")
    for index, (key, name) in enumerate(drawn):
        _plot(ax, *series(records, key), name, *_line_look(index))
    if panel.band and all(_has(records, key) for key in panel.band):
        (steps, low), (_, high) = series(records, panel.band[0]), series(records, panel.band[1])
        ax.fill_between(steps, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="min to max")
    if panel.scale == "share":
        ax.set_ylim(-0.02, 1.02)
    if panel.scale == "percent":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.scale == "count":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_ylabel(panel.label)
    _legend(ax)


def _legend(ax: Axes) -> None:
    """Beside the axes, where it hides nothing; a single line needs none, the y axis has its name."""
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _line_look(index: int) -> tuple[str, str]:
    """Color and style of a panel's lines, from 0."""
    return COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--"


def _plot(
    ax: Axes, x: list[float] | list[int], y: list[float], name: str, color: str, style: str = "-"
) -> None:
    marker = "o" if sum(map(math.isfinite, y)) <= FEW_POINTS else ""
    ax.plot(x, y, style, color=color, label=name, linewidth=1.5, marker=marker, markersize=3)


def _draw_non_finite(ax: Axes, records: list[Record]) -> None:
    """A red cross on the x axis for every step whose loss is not a finite number."""
    bad = [r["step"] for r in records if r.get("loss") is not None and not math.isfinite(r["loss"])]
    if bad:
        transform = ax.get_xaxis_transform()
        ax.plot(bad, [0] * len(bad), "x", color="red", transform=transform, clip_on=False, label="not finite")
        _legend(ax)


def _draw_baselines(ax: Axes, summary_path: Path) -> None:
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.exists() else {}
    for name, style in (("unigram", ":"), ("bigram", "--")):
        perplexity = summary.get(f"{name}_perplexity")
        if perplexity is not None:
            ax.axhline(math.log(float(perplexity)), color=COLORS[-1], linestyle=style, label=name)
    _legend(ax)


def _draw_layers(figure: Figure, ax: Axes, key: str, label: str, records: list[Record]) -> None:
    """A row per layer; the column of a record reaches back to the record before."""
    having = [record for record in _with_key(records, key) if "event" not in record]
    num_layers = max(len(record[key]) for record in having if record.get(key) is not None)
    table = [record.get(key) or [math.nan] * num_layers for record in having]
    columns = list(zip(*table, strict=True))
    edges = [_first_step(having), *(record["step"] for record in having)]
    mesh = ax.pcolormesh(edges, [i - 0.5 for i in range(num_layers + 1)], columns, cmap="viridis")
    if key == "layer_recall":
        mesh.set_clim(0, 1)
    figure.colorbar(mesh, ax=ax, label=label, pad=0.01)
    ax.set_ylabel("layer")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.grid(False)


def _finish(figure: Figure, axes: list[Axes], records: list[Record], path: Path) -> Path:
    """Phases as vertical lines with their names on top, steps and tokens at the bottom; then the file."""
    starts = phase_starts(records)
    for ax in axes:
        for step, _ in starts[1:]:
            ax.axvline(step, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_xlim(starts[0][0], max(record["step"] for record in records))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.tick_params(labelbottom=ax is axes[-1])
    for step, phase in starts:
        transform = axes[0].get_xaxis_transform()
        axes[0].text(step, 1.0, phase, transform=transform, rotation=35, fontsize=8, color="#555555")
    tokens_per_step = _tokens_per_step(records)
    if tokens_per_step:
        text = FuncFormatter(lambda step, _: f"{step:,.0f}\n{compact(step * tokens_per_step)}")
        axes[-1].xaxis.set_major_formatter(text)
    axes[-1].set_xlabel("step, and tokens seen" if tokens_per_step else "step")
    figure.savefig(path)
    return path
