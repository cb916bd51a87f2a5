"""The page of time and memory: what the benches of one machine measured, with theory and the paper beside it; and
efficiency.csv, from which texts take its numbers (`study/verdicts.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gsa_train.config import Config, ConfigError, PhaseConfig
from gsa_train.files import write_atomically
from gsa_train.model.flops import causal_mean_keys, flops_per_token, mean_selected_keys
from gsa_train.study.results import NOT_RUN, Standing
from gsa_train.study.tables import VALUES_HEAD, bullets, csv_text, markdown_table
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


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    cases: Sequence[Case]


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
                found[name] = Bench(content["rows"], path, where["commit"], f"`{name}`: {about}")
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    path, [f"damaged ({error!r}); write it again by {name}.py --out"]
                ) from error
    return found


def efficiency_tables(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> list[Table]:
    """
    Args:
        shapes: config by the benches' name of its shape, `1.7B`.
    """
    times = ["forward", "theory", "forward + backward", "with indexer loss", "peak memory"]
    of_steps = ["shape", "tokens", "layers", "model", "r", "step, ms", "over standard", "theory", "the paper"]
    memory = ["peak memory, GiB", "over standard"]
    generation = ["", "tokens", "sequences", "model", "ms", "over standard", "theory", "the paper, at 128K"]
    found = [
        Table(
            "One layer's attention",
            ["shape", "tokens", "selection", "r", *times],
            [*_random_inputs(benches, shapes), *_selections(benches, shapes)],
        ),
        Table(
            "A training step of the whole model",
            ["config", "step, ms", "over standard", "the paper", "peak memory, GiB"],
            list(_steps(benches)),
        ),
        Table(
            "Training steps from 4K to 128K tokens",
            [*of_steps, *memory, "commit"],
            [*_few_layers(benches), *_whole_models(benches)],
        ),
        Table(
            "Generation by the whole model",
            [*generation, *memory],
            list(_generation(benches, shapes)),
        ),
    ]
    return [table for table in found if table.cases]


def write_efficiency_values(tables: Sequence[Table], benches: Mapping[str, Bench], out: Path) -> list[Path]:
    """The CSV of all numbers, with the columns of a study's one. Returns the files that were written: none without a
    bench's file."""
    rows: list[Sequence[object]] = []
    for case in (case for table in tables for case in table.cases):
        bench = benches[case.bench]
        where = (bench.path.as_posix(), "", case.commit or bench.commit)
        rows += [
            (case.name, 1, KEYS[key], key, f"by {case.bench}", repr(value), *where)
            for key, value in case.values.items()
            if value is not None
        ]
    if not rows:
        return []
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path := out / f"{NAME}.csv", csv_text([VALUES_HEAD, *rows]))
    return [path]


def write_efficiency(
    tables: Sequence[Table], benches: Mapping[str, Bench], out: Path
) -> tuple[Standing, Path]:
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
    for table in tables:
        rows = [list(table.head), *(list(case.cells) for case in table.cases)]
        parts += [f"## {table.title}", markdown_table(rows)]
    parts += ["## Source", bullets(bench.about for bench in benches.values())] if benches else []
    parts += [f"In full in [{NAME}.csv]({NAME}.csv)."] if tables else []
    parts.append("Made by `python launch/results.py` from the benches' files: do not edit.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n\n".join(filter(None, parts)) + "\n")
    said = verdict.splitlines()[0] if verdict else "no verdict yet"
    return Standing(
        path.name, TITLE, f"{len(benches)} of {len(BENCHES)} benches", said if benches else NOT_RUN
    ), path


def _rows(benches: Mapping[str, Bench], bench: str) -> Sequence[Mapping[str, Any]]:
    return benches[bench].rows if bench in benches else ()


def _name(*words: object) -> str:
    return "_".join(map(str, words)).replace(" ", "_")


def _random_inputs(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
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


def _selections(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
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


def _steps(benches: Mapping[str, Bench]) -> Iterator[Case]:
    bench = "bench_step"
    rows = [row for row in _rows(benches, bench) if "config" in row]
    standard = next((row for row in rows if row["config"].startswith("standard_")), None)
    for row in rows:
        paper = PAPER["step"] if row["config"].startswith("gsa_") else ""
        memory = row["peak_gib"] / standard["peak_gib"] if standard else None
        values = {"ms": row["step_ms"], "time": row["ratio"], "gib": row["peak_gib"], "memory": memory}
        cells = [row["config"], f"{row['step_ms']:.1f}", _two(row["ratio"]), paper, f"{row['peak_gib']:.1f}"]
        yield Case(_name("step", row["config"]), cells, values, bench)


def _case(row: Mapping[str, Any], model: str) -> tuple[Any, ...]:
    """Of one device and commit."""
    return (row["gpu"], row["commit"], row["shape"], row["length"], row.get("layers"), model)


def _few_layers(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """Steps of models with few layers. The newest row of each case."""
    rows = _rows(benches, STEPS)
    steps = {_case(row, row["model"]): row for row in rows if row.get("step_ms") is not None}
    newest = {key[2:]: (key, row) for key, row in steps.items()}
    for key, row in sorted(newest.values(), key=lambda each: (each[0][2], *each[0][3:5])):
        standard = steps.get((*key[:5], "standard"))
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
            shape, str(length), str(layers), model, "–" if row.get("r") is None else f"{row['r']:.2g}",
            f"{values['ms']:.1f}", _two(values["time"]), _two(values["theory"]), paper, f"{values['gib']:.1f}",
            _two(values["memory"]), row["commit"],
        ]  # fmt: skip
        yield Case(_name("step", shape, length, layers, "layers", model), cells, values, STEPS, row["commit"])


def _whole_models(benches: Mapping[str, Bench]) -> Iterator[Case]:
    """What two depths say of the whole model. The newest row of each case."""
    rows = _rows(benches, STEPS)
    whole = {_case(row, row["model"])[2:]: row for row in rows if "whole_ms" in row}.values()
    for row in sorted(whole, key=lambda each: (each["shape"], each["length"])):
        time_over = 1 / row["whole_speed_up"] if row.get("whole_speed_up") else None
        shape, length, model = row["shape"], row["length"], row["model"]
        cells = [
            shape, str(length), "all", model, "–", f"{row['whole_ms']:.1f}", _two(time_over), "–", "", "–", "–",
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


def _generation(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> Iterator[Case]:
    """Prefill, and a token of decoding. Theory of the latter: what the weights and caches take to be read."""
    bench = "bench_generate"
    rows = _rows(benches, bench)
    for row in rows:
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
            cells += ["–" if peak is None else f"{peak:.1f}", _two(values["memory"]) + said]
            yield Case(_name("prefill", length, model), cells, values, bench)
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
            cells += [_two(values["time"]), _two(values["theory"]), paper, "–", "–"]
            yield Case(_name("decode", length, batch, model), cells, values, bench)


def _two(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
