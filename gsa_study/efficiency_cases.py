"""Convert benchmark results to rows of the page of time and memory: GSA relative to the standard model, and the
theory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsa_train.config import Config, PhaseConfig
from gsa_train.model.flops import causal_mean_keys, flops_per_token, mean_selected_keys

DENSE = "torch cuDNN"
PAPER = {"step": "0.87", "prefill": "0.09", "decode": "0.13", "memory": "0.97"}
"""arXiv 2601.15305: GSA relative to the standard model, at 128K tokens except for the training step."""
STEPS = "bench_step_lengths"
BENCHES = ("bench_long", "bench_long_trained", "bench_step", STEPS, "bench_generate")


@dataclass(frozen=True)
class Bench:
    rows: Sequence[Mapping[str, Any]]
    path: Path
    commit: str
    about: str
    """Versions and GPU of the benchmark."""


@dataclass(frozen=True)
class Case:
    """Describes one model at one length: a row of a table."""

    name: str
    """Name of the arm in the CSV."""
    about: Sequence[object]
    """The row's first cells."""
    values: Mapping[str, float | None]
    """Key in the CSV (`KEYS`) -> number; None: not measured."""
    bench: str
    commit: str = ""
    """Commit of the row if the rows of the benchmark have several."""
    is_shown: bool = True
    """True if the page shows the row; the CSV has all rows."""


KEYS = {
    "ms": "time, ms",
    "time": "time over the standard model's",
    "forward": "time over dense attention's, forward",
    "forward_backward": "time over dense attention's, forward + backward",
    "with_indexer_loss": "time over dense attention's, forward + backward + indexer loss",
    "theory": "time over the standard model's or dense attention's, by theory",
    "gib": "peak memory, GiB",
    "memory": "peak memory over the standard model's or dense attention's",
}


def _rows(benches: Mapping[str, Bench], bench: str) -> Sequence[Mapping[str, Any]]:
    return benches[bench].rows if bench in benches else ()


def _name(*words: object) -> str:
    return "_".join(map(str, words)).replace(" ", "_")


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other


def _digits(r: float | None) -> str:
    return "–" if r is None else f"{r:.2g}"


def selections(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    """Yield a row for each length and selection: made selections, each with its r, and selections of a trained
    indexer."""
    for bench in ("bench_long", "bench_long_trained"):
        rows = [row for row in _rows(benches, bench) if "attention" in row]
        dense = {(row["shape"], row["length"]): row for row in rows if row["attention"] == DENSE}
        for row in rows:
            if row["r"] is None:
                continue
            shape, length = row["shape"], row["length"]
            other = dense[shape, length]
            values = {
                "forward": row["forward_ms"] / other["forward_ms"],
                "theory": forward_ratio(shapes.get(shape), length),
                "forward_backward": row["both_ms"] / other["both_ms"],
                "with_indexer_loss": _over(row["both_kl_ms"], other["both_ms"]),
                "memory": row["peak_gib"] / other["peak_gib"],
            }
            kind, r = row["attention"].removeprefix("GSA "), _digits(row["r"])
            name = _name("layer", shape, length, kind) + ("" if "selected" in kind else f"_r{r}")
            yield Case(name, (shape, length, kind, r), values, bench)


def forward_ratio(config: Config | None, length: int) -> float | None:
    """Return the operations of GSA's attention in a forward pass, divided by the operations of dense attention. GSA
    computes scores of all keys and products with the selected keys."""
    if config is None:
        return None
    model, gsa = config.model, config.gsa
    dense = 4 * model.num_heads * model.head_dim * causal_mean_keys(length)
    selected = mean_selected_keys(gsa, [range(1, length + 1)])
    scores = 2 * gsa.indexer_heads * (gsa.indexer_dim + 1) * causal_mean_keys(length)
    return (4 * model.num_heads * model.head_dim * selected + scores) / dense


def steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    bench = "bench_step"
    rows = [row for row in _rows(benches, bench) if "config" in row]
    standard = next((row["peak_gib"] for row in rows if row["config"].startswith("standard_")), None)
    for row in rows:
        memory = _over(row["peak_gib"], standard)
        values = {"ms": row["step_ms"], "time": row["ratio"], "gib": row["peak_gib"], "memory": memory}
        yield Case(_name("step", row["config"]), (row["config"],), values, bench)


def _run(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a value that is equal for rows whose models were measured side by side."""
    return row["gpu"], row["commit"], row.get("micro_batch")


def _model(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a value that is equal for rows of the same model."""
    return row["shape"], row["length"], row.get("layers"), row["model"]


def measured_steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """Yield the measured training steps, with the newest row of each model. A model has few layers or all layers. The
    page shows the models with most layers."""
    rows = _rows(benches, STEPS)
    whole = {(_run(row), _model(row)) for row in rows if "whole_ms" in row}
    steps = {(_run(row), _model(row)): row for row in rows if row.get("step_ms") is not None}
    newest = {model: (run, row) for (run, model), row in steps.items()}
    deepest: dict[tuple[str, int], int] = {}
    for shape, length, layers, _ in newest:
        deepest[shape, length] = max(layers, deepest.get((shape, length), 0))
    for model_key, (run, row) in sorted(newest.items(), key=lambda each: each[0][:3]):
        standard = steps.get((run, (*model_key[:3], "standard")), {})
        is_whole = (run, model_key) in whole
        values = {
            "ms": row["step_ms"],
            "time": _over(1, row.get("speed_up") or None),
            "theory": 1 / row["flops_limit"],
            "gib": row["peak_gib"],
            "memory": _over(row["peak_gib"], standard.get("peak_gib")),
        }
        shape, length, layers, model = row["shape"], row["length"], row["layers"], row["model"]
        about = (shape, length, "all" if is_whole else layers, model, _digits(row.get("r")))
        depth = () if is_whole else (layers, "layers")
        is_shown = layers == deepest[shape, length]
        yield Case(_name("step", shape, length, *depth, model), about, values, STEPS, row["commit"], is_shown)


def scaled_steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """Yield whole models whose time was not measured but scaled from two depths. Each model has its newest row."""
    rows = _rows(benches, STEPS)
    measured = {_model(row) for row in rows if row.get("step_ms") is not None}
    whole = {_model(row): row for row in rows if "whole_ms" in row}
    scaled = [row for model, row in whole.items() if model not in measured]
    for row in sorted(scaled, key=lambda each: (each["shape"], each["length"])):
        shape, length, model = row["shape"], row["length"], row["model"]
        values = {"ms": row["whole_ms"], "time": _over(1, row.get("whole_speed_up") or None)}
        about = (shape, length, "all, scaled", model, "–")
        yield Case(_name("step", shape, length, model), about, values, STEPS, row["commit"])


def prefill_ratio(config: Config | None, length: int) -> float | None:
    """Return the operations of GSA's forward pass divided by the operations of the standard model's forward pass. Both
    counts leave out the logits."""
    if config is None:
        return None
    phase = PhaseConfig(attention="sparse", train="base")
    found = flops_per_token(config.model, config.gsa, config.moe, phase, length)
    # The forward pass is a third of a trained part. The indexer is not trained, and has only a forward pass.
    trained = found.projections + found.gates + found.mlp + found.attention
    ours = trained / 3 + found.indexer_projections + found.indexer_scores
    return ours / ((found.dense_equivalent - found.output - found.gates) / 3)


def generation(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    """Yield prefill, and a token of decoding. In theory decoding takes the time to read weights and caches."""
    bench, same = "bench_generate", ("prefill", "batch", "length")
    rows = [row for row in _rows(benches, bench) if "prefill" in row or "step_ms" in row]
    for row in rows:
        model, commit = row["model"], row.get("commit") or benches[bench].commit
        standard = next(
            each
            for each in rows
            if each["model"] == "standard" and all(each.get(key) == row.get(key) for key in same)
        )
        if (length := row.get("prefill")) is not None:
            theory = prefill_ratio(shapes.get("1.7B"), length)
            values = {
                "ms": row["ms"],
                "time": row["ms"] / standard["ms"],
                "theory": 1.0 if model == "standard" else theory,
                "gib": row.get("peak_gib"),  # absent in rows of earlier versions
                "memory": _over(row.get("peak_gib"), standard.get("peak_gib")),
            }
            yield Case(_name("prefill", length, model), ("prefill", length, 1, model), values, bench, commit)
        else:
            values = {
                "ms": row["step_ms"],
                "time": row["step_ms"] / standard["step_ms"],
                "theory": row["bound_ms"] / standard["bound_ms"],
            }
            about = ("decode", row["length"], row["batch"], model)
            name = _name("decode", row["length"], row["batch"], model)
            yield Case(name, about, values, bench, commit)
