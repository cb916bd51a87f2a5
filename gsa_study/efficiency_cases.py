"""What each bench measured, as rows of the page of time and memory: GSA's time and memory over the standard model's,
with theory and the paper beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gsa_train.config import Config, PhaseConfig
from gsa_train.model.flops import causal_mean_keys, flops_per_token, mean_selected_keys

DENSE = "torch cuDNN"
LONG = 131072
PAPER = {"step": "0.87", "prefill": "0.09", "decode": "0.13", "memory": "0.97"}
"""arXiv 2601.15305: GSA over the standard model; at 128K tokens, but for the training step."""
STEPS = "bench_step_lengths"
BENCHES = ("bench_gsa", "bench_long", "bench_long_trained", "bench_step", STEPS, "bench_generate")
SHARED_BLOCK, SHARED_WINDOW = 32, 64
"""Of what the benches call shared."""


@dataclass(frozen=True)
class Bench:
    rows: Sequence[Mapping[str, Any]]
    path: Path
    commit: str
    about: str
    """What ran where."""


@dataclass(frozen=True)
class Case:
    """One model at one length: a row of a table."""

    name: str
    """The arm's in the CSV."""
    cells: Sequence[str]
    values: Mapping[str, float | None]
    """Key in the CSV (`KEYS`) -> number; None: not measured."""
    bench: str
    commit: str = ""
    """Where not all rows of the bench are of one."""
    is_shown: bool = True
    """On the page; else in the CSV alone."""


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


def random_inputs(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    bench, kind = "bench_gsa", "random inputs"
    for row in _rows(benches, bench):
        if row.get("mode") == "graph" and row["batch"] == 1:
            shape, length = row["shape"], row["length"]
            values = {
                "forward": row["forward_ms"] / row["dense_forward_ms"],
                "theory": forward_ratio(shapes.get(shape), length, 1),
                "forward_backward": row["both_without_kl_ms"] / row["dense_both_ms"],
                "with_indexer_loss": row["both_ms"] / row["dense_both_ms"],
            }
            cells = [shape, str(length), kind, "–", *map(_two, values.values()), "–"]
            yield Case(_name("layer", shape, length, kind), cells, values, bench)


def selections(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    """A length and a selection a row: made ones, each with its r, and those of a trained indexer."""
    for bench in ("bench_long", "bench_long_trained"):
        rows = [row for row in _rows(benches, bench) if "attention" in row]
        dense = {(row["shape"], row["length"]): row for row in rows if row["attention"] == DENSE}
        for row in rows:
            if row["r"] is None:
                continue
            shape, length = row["shape"], row["length"]
            beside = dense[shape, length]
            block = 32 if "block" in row["attention"] else 1
            values = {
                "forward": row["forward_ms"] / beside["forward_ms"],
                "theory": forward_ratio(shapes.get(shape), length, block),
                "forward_backward": row["both_ms"] / beside["both_ms"],
                "with_indexer_loss": None
                if row["both_kl_ms"] is None
                else row["both_kl_ms"] / beside["both_ms"],
                "memory": row["peak_gib"] / beside["peak_gib"],
            }
            kind, r = row["attention"].removeprefix("GSA "), f"{row['r']:.2g}"
            name = _name("layer", shape, length, kind) + ("" if "selected" in kind else f"_r{r}")
            yield Case(name, [shape, str(length), kind, r, *map(_two, values.values())], values, bench)


def forward_ratio(config: Config | None, length: int, block: int) -> float | None:
    """Operations of GSA's attention over dense attention's, forward: scores of all keys and products with the
    selected ones; with blocks one score for all their queries."""
    if config is None:
        return None
    model, gsa = config.model, config.gsa
    dense = 4 * model.num_heads * model.head_dim * causal_mean_keys(length)
    selected = mean_selected_keys(gsa, [range(1, length + 1)])
    scores = 2 * gsa.indexer_heads * (gsa.indexer_dim + 1) * causal_mean_keys(length) / block
    return (4 * model.num_heads * model.head_dim * selected + scores) / dense


def steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    bench = "bench_step"
    rows = [row for row in _rows(benches, bench) if "config" in row]
    standard = next((row for row in rows if row["config"].startswith("standard_")), None)
    for row in rows:
        paper = PAPER["step"] if row["config"].startswith("gsa_") else ""
        memory = row["peak_gib"] / standard["peak_gib"] if standard else None
        values = {"ms": row["step_ms"], "time": row["ratio"], "gib": row["peak_gib"], "memory": memory}
        cells = [row["config"], f"{row['step_ms']:.1f}", _two(row["ratio"]), paper, f"{row['peak_gib']:.1f}"]
        yield Case(_name("step", row["config"]), cells, values, bench)


def _run(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows have in common whose models were measured beside each other."""
    return row["gpu"], row["commit"], row.get("micro_batch")


def _model(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Whose steps they are."""
    return row["shape"], row["length"], row.get("layers"), row["model"]


def measured_steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """Steps of models with few layers, or with all: shown are the deepest. The newest row of each model."""
    rows = _rows(benches, STEPS)
    whole = {(_run(row), _model(row)) for row in rows if "whole_ms" in row}
    steps = {(_run(row), _model(row)): row for row in rows if row.get("step_ms") is not None}
    newest = {model: (run, row) for (run, model), row in steps.items()}
    deepest: dict[tuple[str, int], int] = {}
    for shape, length, layers, _ in newest:
        deepest[shape, length] = max(layers, deepest.get((shape, length), 0))
    for model_key, (run, row) in sorted(newest.items(), key=lambda each: each[0][:3]):
        standard = steps.get((run, (*model_key[:3], "standard")))
        is_whole = (run, model_key) in whole
        values = {
            "ms": row["step_ms"],
            "time": 1 / row["speed_up"] if row.get("speed_up") else None,
            "theory": 1 / row["flops_limit"],
            "gib": row["peak_gib"],
            "memory": row["peak_gib"] / standard["peak_gib"] if standard else None,
        }
        shape, length, layers, model = row["shape"], row["length"], row["layers"], row["model"]
        paper = PAPER["step"] if model.startswith("gsa") and length == 4096 else ""
        cells = [
            shape, str(length), "all" if is_whole else str(layers), model,
            "–" if row.get("r") is None else f"{row['r']:.2g}",
            f"{values['ms']:.1f}", _two(values["time"]), _two(values["theory"]), paper, f"{values['gib']:.1f}",
            _two(values["memory"]), row["commit"],
        ]  # fmt: skip
        depth = () if is_whole else (layers, "layers")
        is_shown = layers == deepest[shape, length]
        yield Case(_name("step", shape, length, *depth, model), cells, values, STEPS, row["commit"], is_shown)


def scaled_steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """What two depths say of a whole model that was not measured. The newest row of each model."""
    rows = _rows(benches, STEPS)
    measured = {_model(row) for row in rows if row.get("step_ms") is not None}
    whole = {_model(row): row for row in rows if "whole_ms" in row}
    scaled = [row for model, row in whole.items() if model not in measured]
    for row in sorted(scaled, key=lambda each: (each["shape"], each["length"])):
        time_over = 1 / row["whole_speed_up"] if row.get("whole_speed_up") else None
        shape, length, model = row["shape"], row["length"], row["model"]
        cells = [
            shape, str(length), "all, scaled", model, "–", f"{row['whole_ms']:.1f}", _two(time_over), "–", "", "–", "–",
            row["commit"],
        ]  # fmt: skip
        values = {"ms": row["whole_ms"], "time": time_over}
        yield Case(_name("step", shape, length, model), cells, values, STEPS, row["commit"])


def prefill_ratio(config: Config | None, length: int, is_shared: bool) -> float | None:
    """Operations of GSA's forward pass over the standard model's, of the last token's logits neither's."""
    if config is None:
        return None
    gsa = config.gsa
    if is_shared:
        gsa = replace(gsa, selection_block=SHARED_BLOCK, local_window=SHARED_WINDOW)
    phase = PhaseConfig(attention="sparse", train="base")
    found = flops_per_token(config.model, gsa, config.moe, phase, length)
    # Of what is trained a third is the forward pass; the indexer, which is not, has no other.
    trained = found.projections + found.gates + found.mlp + found.attention
    ours = trained / 3 + found.indexer_projections + found.indexer_scores
    return ours / ((found.dense_equivalent - found.output - found.gates) / 3)


def generation(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    """Prefill, and a token of decoding. Theory of the latter: what the weights and caches take to be read."""
    bench = "bench_generate"
    rows = _rows(benches, bench)
    for row in rows:
        commit = row.get("commit") or benches[bench].commit
        if "prefill" in row:
            standard = next(
                each for each in rows if each.get("prefill") == row["prefill"] and each["model"] == "standard"
            )
            length, model, peak = row["prefill"], row["model"], row.get("peak_gib")
            is_gsa, at_paper_s = model != "standard", model == "GSA" and length == LONG
            values = {
                "ms": row["ms"],
                "time": row["ms"] / standard["ms"],
                "theory": prefill_ratio(shapes.get("1.7B"), length, model == "GSA shared") if is_gsa else 1.0,
                "gib": peak,  # rows of earlier versions have none
                "memory": None if peak is None else peak / standard["peak_gib"],
            }
            said = f" (the paper: {PAPER['memory']})" if at_paper_s and peak is not None else ""
            cells = ["prefill", str(length), "1", model, f"{row['ms']:.1f}"]
            cells += [_two(values["time"]), _two(values["theory"]), PAPER["prefill"] if at_paper_s else ""]
            cells += ["–" if peak is None else f"{peak:.1f}", _two(values["memory"]) + said, commit]
            yield Case(_name("prefill", length, model), cells, values, bench, commit)
        elif "step_ms" in row:
            same = ("batch", "length")
            standard = next(
                each
                for each in rows
                if all(each.get(key) == row[key] for key in same) and each["model"] == "standard"
            )
            length, batch, model = row["length"], row["batch"], row["model"]
            values = {
                "ms": row["step_ms"],
                "time": row["step_ms"] / standard["step_ms"],
                "theory": row["bound_ms"] / standard["bound_ms"],
            }
            paper = PAPER["decode"] if model == "GSA" and length == LONG else ""
            cells = ["decode", str(length), str(batch), model, f"{row['step_ms']:.2f}"]
            cells += [_two(values["time"]), _two(values["theory"]), paper, "–", "–", commit]
            yield Case(_name("decode", length, batch, model), cells, values, bench, commit)


def _two(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
