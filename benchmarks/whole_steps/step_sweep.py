"""Measures whole steps over lengths, shapes and models, case by case into one file that later calls extend."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import harness
import torch

from gsa_train.distributed.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.model.flops import flops_per_token
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.micro_batch_graph import leave_default_stream
from whole_steps.baseline import Baseline
from whole_steps.planted_indexer import LIKENESS, alike, plant
from whole_steps.step_bench import OurTrainee, release_memory
from whole_steps.step_cases import BASELINE, BY_DEFAULT, LENGTHS, MODELS, SHAPES, STANDARD, StepCase, plan
from whole_steps.step_timing import Subject, Turns, measure

FILE = "bench_step_lengths"

COLUMNS = (
    "selection",
    "indexer split",
    "indexer KL",
    "attention",
    "sums by key",
    "matmuls",
    "norm",
    "copies, fills",
    "elementwise, sums",
    "optimizer",
    "communication",
    "other",
    "idle",
)
"""Parts of a step in a row. `other` holds all other parts of `step_timing.PARTS`."""

AIMED = ("gsa", "gsa_graphs")
AIMS = {4096: 1 / 1.06, 8192: 1.0, 16384: 1.2, 32768: 1.5, 131072: 3.0}
"""Maps a length to the smallest `speed_up` that the AIMED models should reach with all layers of the 1.7B shape."""

FIXED = (
    "gpu", "commit", "shape", "length", "layers", "model", "sequences", "vocab", "indexer",
    "step_ms", "speed_up", "speed_up_error", "tokens_per_second", "mfu", "flops_limit", "host_ms", "peak_gib",
    "synchronizations", "launches", "r", "mean_k",
)  # fmt: skip
"""Columns of a row before the parts."""

SAME_MODEL = ("shape", "length", "model", "sequences", "vocab", "indexer")
"""Cells that must be equal in the rows of two depths from which a whole model is computed."""

Cells = dict[str, harness.Cell]


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("steps over lengths (with --lengths)")
    group.add_argument("--lengths", type=int, nargs="+", metavar="L", help=f"of {LENGTHS}, or others")
    group.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    group.add_argument("--models", nargs="+", choices=MODELS, default=list(BY_DEFAULT))
    group.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[],
        help="depths in place of the shape's own: with all layers (24 of 1.7b) whole models take turns, none is scaled",
    )
    group.add_argument(
        "--seconds", type=float, default=5.0, help="of turns for each case; three turns at least"
    )
    group.add_argument(
        "--indexer",
        choices=("alike", "own"),
        default="alike",
        help="selections like a trained model's, or selections of random weights",
    )
    group.add_argument("--again", action="store_true", help="measure cases that the file has, too")


def main(arguments: argparse.Namespace) -> int:
    report = harness.Report(FILE, arguments)
    report.take_over()
    try:
        groups = plan(arguments.shapes, arguments.lengths, arguments.models, arguments.layers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    parallel = init_parallel(groups[0][0].config(arguments.overrides).parallel, seed=1)
    leave_default_stream(parallel.device)  # for CUDA graphs; the same for all models
    bench = Sweep(report, arguments, parallel)
    for group in groups:
        bench.run(group)
    add_whole_models(report)
    shutdown_parallel()
    return report.finish()


@dataclass(frozen=True)
class Sweep:
    """Measures the groups of cases one after another."""

    report: harness.Report
    arguments: argparse.Namespace
    parallel: Parallel

    def run(self, group: Sequence[StepCase]) -> None:
        """Measure cases that the file lacks. The standard model stays on the device while others are measured."""
        missing = [case for case in group if self.arguments.again or not self._has(case)]
        if not missing:
            return
        reference: Subject | None = None
        for case in group:
            if case.model == STANDARD:
                reference = self._measured(case, None, case in missing)
            elif case in missing:
                self._measured(case, reference, True)
        if reference is not None:
            reference.bench.close()
        del reference
        release_memory(self.parallel.device)

    def identity(self, case: StepCase) -> Cells:
        indexer = "own" if self.arguments.indexer == "own" else f"alike {LIKENESS:g}"
        return {
            "gpu": self.report.environment["gpu"],
            "commit": self.report.environment["commit"],
            **asdict(case),
            "vocab": case.config(self.arguments.overrides).model.vocab_size,
            "indexer": indexer if case.has_indexer else "none",
        }

    def _has(self, case: StepCase) -> bool:
        wanted = self.identity(case).items()
        return any(wanted <= row.items() for row in self.report.rows if "whole_ms" not in row)

    def _measured(self, case: StepCase, reference: Subject | None, with_row: bool) -> Subject | None:
        """Measure a case and store its row. Return the model if it is the standard model and fits the device. Otherwise
        return None."""
        subject, failed = None, ""
        cells: Cells = {}
        try:
            subject = self._build(case)
            if with_row:
                cells = self._row(subject, reference, case)
        except torch.OutOfMemoryError as error:
            failed = f"out of memory: {str(error).splitlines()[0]}"
        if with_row:  # after the handler, because its error holds references to the tensors
            self._keep(self.identity(case) | cells | {"failed": failed})
        if subject is not None and (case.model != STANDARD or failed):
            subject.bench.close()
            subject = None
        release_memory(self.parallel.device)
        return subject

    def _build(self, case: StepCase) -> Subject:
        config = case.config(self.arguments.overrides)
        others_bytes = torch.cuda.memory_allocated()
        # A rate of 0 keeps weights, and therefore selections, unchanged.
        trainee: OurTrainee | Baseline
        if case.model == BASELINE:
            trainee = Baseline(config, self.parallel, float8=False, lr=0.0)
        else:
            trainee = OurTrainee(config, config.phases[-1], self.parallel, self._planting(case), lr=0.0)
        subject = Subject(case.model, trainee, others_bytes)
        subject.set_micro_batch(case.sequences)
        return subject

    def _planting(self, case: StepCase) -> Callable[[Model], None] | None:
        if not case.has_indexer or self.arguments.indexer == "own":
            return None

        def prepare(model: Model) -> None:
            layers = [
                alike(attention.indexer, case.length, LIKENESS, attention.layer)
                for attention in model.attentions
                if attention.indexer is not None
            ]
            plant(model, layers, case.sequences)

        return prepare

    def _row(self, subject: Subject, reference: Subject | None, case: StepCase) -> Cells:
        for _ in range(1 + subject.bench.warm_up_steps):
            subject.step_seconds()  # compiles
        turns = Turns(self.arguments.seconds / 5, self.arguments.turns, self.arguments.seconds)
        row = measure(subject, reference, turns, not self.arguments.no_profile)
        in_turn = reference is not None or case.model == STANDARD
        parts = dict.fromkeys(COLUMNS, 0.0)
        for name, took in row.parts.items():
            parts[name if name in COLUMNS else "other"] += took * row.sequences
        cells: Cells = {
            "step_ms": row.step_ms,
            "speed_up": 1 / row.ratio if in_turn else None,
            "speed_up_error": row.ratio_error / row.ratio**2 if in_turn else None,
            "tokens_per_second": row.tokens_per_second,
            "mfu": row.mfu,
            "flops_limit": self._flops_limit(case),
            "host_ms": row.host_ms,
            "peak_gib": row.peak_gib,
            "synchronizations": row.synchronizations,
            "launches": row.launches,
            **selected(subject),
        }
        return cells | {f"{name} ms": took for name, took in parts.items()}

    def _flops_limit(self, case: StepCase) -> float:
        """Return the speed-up at equal MFU: the FLOPs of the standard model divided by the FLOPs of this model."""
        totals = []
        for each in (replace(case, model=STANDARD), case):
            config = each.config(self.arguments.overrides)
            flops = flops_per_token(config.model, config.gsa, config.moe, config.phases[-1], each.length)
            totals.append(flops.total)
        return totals[0] / totals[1]

    def _keep(self, cells: Cells) -> None:
        """Store a row in place of an older row of the same case."""
        names = [*FIXED, *(f"{name} ms" for name in COLUMNS), "failed"]
        identity = {name: cells[name] for name in FIXED[: FIXED.index("step_ms")]}
        self.report.rows = [row for row in self.report.rows if not identity.items() <= row.items()]
        self.report.row(**{name: cells.get(name) for name in names})


def selected(subject: Subject) -> Cells:
    """Describe the selections of a step by means over the layers; empty if attention is dense."""
    if subject.bench.phase.attention == "dense":
        return {}
    assert isinstance(subject.bench, OurTrainee)
    stats = subject.bench.model.runtime.stats
    try:
        subject.bench.step(subject.batches, measures=True)
    except torch.OutOfMemoryError:  # the step has its time, but these rows lack r
        return {}
    found = stats.read()
    stats.reset()

    def mean(name: str) -> float | None:
        values = [each for each in found.get(name, []) if each is not None]
        return statistics.fmean(values) if values else None

    return {"r": mean("union_ratio_32"), "mean_k": mean("k_mean")}


def whole_model(shallow: Mapping[str, Any], deep: Mapping[str, Any], layers: int) -> tuple[float, float]:
    """Compute ms of a layer, and of a step with `layers` layers, from rows of two depths."""
    per_layer = (deep["step_ms"] - shallow["step_ms"]) / (deep["layers"] - shallow["layers"])
    return per_layer, deep["step_ms"] + (layers - deep["layers"]) * per_layer


def add_whole_models(report: harness.Report) -> None:
    """For each whole model, add a row computed from rows measured on this device at this commit. Record whether each
    target in AIMS is met."""
    here = (report.environment["gpu"], report.environment["commit"])
    report.rows = [row for row in report.rows if "whole_ms" not in row or (row["gpu"], row["commit"]) != here]
    report.bars.clear()
    measured: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report.rows:
        if "whole_ms" not in row and (row["gpu"], row["commit"]) == here and row["step_ms"] is not None:
            key = tuple(row[name] for name in SAME_MODEL)
            measured.setdefault(key, []).append(row)
    made = {key: _whole_row(key, rows) for key, rows in measured.items()}
    wholes: list[Cells] = []
    for key, found in made.items():
        if found is None:
            continue
        standard = made.get((*key[:2], STANDARD, *key[3:5], "none"))
        ratio = None if standard is None else float(standard["whole_ms"]) / float(found["whole_ms"])  # type: ignore[arg-type]
        deepest = max(measured[key], key=lambda row: row["layers"])
        if deepest["layers"] == found["layers"] and ratio is not None:
            ratio = deepest["speed_up"]  # not scaled, because the steps took turns
        wholes.append({"gpu": here[0], "commit": here[1], **found, "whole_speed_up": ratio})
    for whole in wholes:
        report.row(**whole)
    for length, aim in AIMS.items():
        for whole in wholes:
            if (whole["shape"], whole["length"]) == ("1.7b", length) and whole["model"] in AIMED:
                value = whole["whole_speed_up"]
                of = f"{whole['model']}, 1.7b at {length}, {whole['indexer']}"
                faster = float("nan") if value is None else float(value)
                report.bar(f"whole step of {of}: standard's time over its", faster, at_least=aim)


def _whole_row(key: tuple[Any, ...], rows: list[dict[str, Any]]) -> Cells | None:
    """Return None if only one depth was measured, unless it is the whole model."""
    shape = SHAPES[key[0]]
    rows = sorted(rows, key=lambda row: row["layers"])
    per_layer: float | None = None
    if rows[-1]["layers"] == shape.layers:
        whole = rows[-1]["step_ms"]
    elif len(rows) > 1:
        per_layer, whole = whole_model(rows[0], rows[-1], shape.layers)
    else:
        return None
    named = dict(zip(SAME_MODEL, key, strict=True))
    return {**named, "layers": shape.layers, "layer_ms": per_layer, "whole_ms": whole}
