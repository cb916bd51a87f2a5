"""The page of time and memory: what the benches of one machine measured, with theory and the paper beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gsa_train.config import Config, ConfigError, PhaseConfig
from gsa_train.files import write_atomically
from gsa_train.model.flops import causal_mean_keys, flops_per_token, mean_selected_keys
from gsa_train.study.results import NOT_RUN, Standing
from gsa_train.study.tables import Rows, bullets, markdown_table
from gsa_train.study.verdicts import read_verdict

NAME, TITLE = "efficiency", "Time and memory, 4K to 128K tokens"
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
    about: str
    """What ran where."""


def read_benches(folder: Path) -> dict[str, Bench]:
    """Of the JSON files that the benches write with `--out`; those that are there.

    Raises:
        ConfigError: one is damaged.
    """
    found = {}
    for name in BENCHES:
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                where = content["environment"]
                about = f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {where['commit']}"
                found[name] = Bench(content["rows"], f"`{name}`: {about}")
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    path, [f"damaged ({error!r}); write it again by {name}.py --out"]
                ) from error
    return found


def write_efficiency(
    benches: Mapping[str, Bench], shapes: Mapping[str, Config], out: Path
) -> tuple[Standing, Path]:
    """
    Args:
        shapes: config by the benches' name of its shape, `1.7B`.
    """
    path, verdict = out / f"{NAME}.md", read_verdict(out, NAME)
    parts = [f"# {TITLE}"]
    parts.append(
        "GSA's time and memory over those of the standard model, or of dense attention: below 1 GSA is faster or "
        "smaller. Theory counts operations of matrix products, as the paper's theorem 1 does: scores of all keys by "
        "the indexer, attention to k_base of them; in decoding, the time to read weights and caches. The paper has "
        f"{PAPER['step']} for a training step, and at 128K tokens {PAPER['prefill']} for prefill, {PAPER['decode']} "
        f"for decoding and {PAPER['memory']} for memory."
    )
    parts.append(verdict if benches else f"{NOT_RUN.capitalize()}: `make bench` and `make bench-models`.")
    for title, rows in (
        ("One layer's attention", attention_rows(benches, shapes)),
        ("A training step of the whole model", step_rows(benches)),
        ("Training steps from 4K to 128K tokens", length_rows(benches)),
        ("Generation by the whole model", generation_rows(benches, shapes)),
    ):
        if len(rows) > 1:
            parts += [f"## {title}", markdown_table(rows)]
    parts += ["## Source", bullets(bench.about for bench in benches.values())] if benches else []
    parts.append("Made by `python launch/results.py` from the benches' files: do not edit.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n\n".join(filter(None, parts)) + "\n")
    said = verdict.splitlines()[0] if verdict else "no verdict yet"
    return Standing(
        path.name, TITLE, f"{len(benches)} of {len(BENCHES)} benches", said if benches else NOT_RUN
    ), path


def attention_rows(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Rows:
    """A length and a selection a row."""
    times = ["forward", "theory", "forward + backward", "with indexer loss", "peak memory"]
    table = [["shape", "tokens", "selection", "r", *times]]
    if "bench_gsa" in benches:
        for row in benches["bench_gsa"].rows:
            if row.get("mode") == "graph" and row["batch"] == 1:
                theory = forward_ratio(shapes.get(row["shape"]), row["length"], 1)
                forward, both = row["dense_forward_ms"], row["dense_both_ms"]
                ratios = [
                    row["forward_ms"] / forward,
                    theory,
                    row["both_without_kl_ms"] / both,
                    row["both_ms"] / both,
                ]
                table.append(
                    [row["shape"], str(row["length"]), "random inputs", "–", *map(_two, ratios), "–"]
                )
    for name in ("bench_long", "bench_long_trained"):
        rows = [row for row in benches[name].rows if "attention" in row] if name in benches else []
        dense = {(row["shape"], row["length"]): row for row in rows if row["attention"] == DENSE}
        for row in rows:
            if row["r"] is None:
                continue
            beside = dense[row["shape"], row["length"]]
            block = 32 if "block" in row["attention"] else 1
            ratios = [
                row["forward_ms"] / beside["forward_ms"],
                forward_ratio(shapes.get(row["shape"]), row["length"], block),
                row["both_ms"] / beside["both_ms"],
                None if row["both_kl_ms"] is None else row["both_kl_ms"] / beside["both_ms"],
                row["peak_gib"] / beside["peak_gib"],
            ]
            words = [
                row["shape"],
                str(row["length"]),
                row["attention"].removeprefix("GSA "),
                f"{row['r']:.2g}",
            ]
            table.append([*words, *map(_two, ratios)])
    return table


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


def step_rows(benches: Mapping[str, Bench]) -> Rows:
    table = [["config", "step, ms", "over standard", "the paper", "peak memory, GiB"]]
    for row in benches["bench_step"].rows if "bench_step" in benches else ():
        if "config" in row:
            paper = PAPER["step"] if row["config"].startswith("gsa_") else ""
            table.append(
                [row["config"], f"{row['step_ms']:.1f}", _two(row["ratio"]), paper, f"{row['peak_gib']:.1f}"]
            )
    return table


def length_rows(benches: Mapping[str, Bench]) -> Rows:
    """Steps of models with few layers, and what two depths say of the whole one. The newest row of each case."""
    head = ["shape", "tokens", "layers", "model", "r", "step, ms", "over standard", "theory", "the paper"]
    table = [[*head, "peak memory, GiB", "over standard", "commit"]]
    rows = benches[STEPS].rows if STEPS in benches else ()

    def case(row: Mapping[str, Any], model: str) -> tuple[Any, ...]:
        """Of one device and commit."""
        return (row["gpu"], row["commit"], row["shape"], row["length"], row.get("layers"), model)

    steps = {case(row, row["model"]): row for row in rows if row.get("step_ms") is not None}
    newest = {key[2:]: (key, row) for key, row in steps.items()}
    for key, row in sorted(newest.values(), key=lambda each: (each[0][2], *each[0][3:5])):
        standard = steps.get((*key[:5], "standard"))
        time_over = 1 / row["speed_up"] if row.get("speed_up") else None
        memory_over = row["peak_gib"] / standard["peak_gib"] if standard else None
        paper = PAPER["step"] if row["model"].startswith("gsa") and row["length"] == 4096 else ""
        table.append([
            row["shape"], str(row["length"]), str(row["layers"]), row["model"],
            "–" if row.get("r") is None else f"{row['r']:.2g}", f"{row['step_ms']:.1f}", _two(time_over),
            _two(1 / row["flops_limit"]), paper, f"{row['peak_gib']:.1f}", _two(memory_over), row["commit"],
        ])  # fmt: skip
    whole = {case(row, row["model"])[2:]: row for row in rows if "whole_ms" in row}.values()
    for row in sorted(whole, key=lambda each: (each["shape"], each["length"])):
        time_over = 1 / row["whole_speed_up"] if row.get("whole_speed_up") else None
        table.append([
            row["shape"], str(row["length"]), "all", row["model"], "–", f"{row['whole_ms']:.1f}", _two(time_over),
            "–", "", "–", "–", row["commit"],
        ])  # fmt: skip
    return table


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


def generation_rows(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Rows:
    """Prefill, and a token of decoding. Theory of the latter: what the weights and caches take to be read."""
    head = ["", "tokens", "sequences", "model", "ms", "over standard", "theory", "the paper, at 128K"]
    table = [[*head, "peak memory, GiB", "over standard"]]
    rows = benches["bench_generate"].rows if "bench_generate" in benches else ()
    for row in rows:
        if "prefill" in row:
            standard = next(
                each for each in rows if each.get("prefill") == row["prefill"] and each["model"] == "standard"
            )
            length, is_gsa = row["prefill"], row["model"] != "standard"
            theory = (
                prefill_ratio(shapes.get("1.7B"), length, row["model"] == "GSA shared") if is_gsa else 1.0
            )
            at_paper_s = row["model"] == "GSA" and length == LONG
            words = ["prefill", str(length), "1", row["model"], f"{row['ms']:.1f}"]
            words += [_two(row["ms"] / standard["ms"]), _two(theory), PAPER["prefill"] if at_paper_s else ""]
            peak = row.get("peak_gib")  # rows of earlier versions have none
            over = None if peak is None else peak / standard["peak_gib"]
            said = f" (the paper: {PAPER['memory']})" if at_paper_s and peak is not None else ""
            table.append([*words, "–" if peak is None else f"{peak:.1f}", _two(over) + said])
        elif "step_ms" in row:
            same = ("batch", "length")
            standard = next(
                each
                for each in rows
                if all(each.get(key) == row[key] for key in same) and each["model"] == "standard"
            )
            paper = PAPER["decode"] if row["model"] == "GSA" and row["length"] == LONG else ""
            words = ["decode", str(row["length"]), str(row["batch"]), row["model"], f"{row['step_ms']:.2f}"]
            ratios = [row["step_ms"] / standard["step_ms"], row["bound_ms"] / standard["bound_ms"]]
            table.append([*words, *map(_two, ratios), paper, "–", "–"])
    return table


def _two(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
