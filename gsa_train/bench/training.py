"""Whole models side by side, layout after layout, in one world of ranks: speed and memory of each.

Ours by their configs, and megatron-core's own model with the sizes of a config (megatron_peer.py).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gsa_train.batches import MicroBatch
from gsa_train.bench.failures import RankFailed, agree, give_up
from gsa_train.bench.layout_names import layout_overrides
from gsa_train.bench.megatron_peer import MegatronTrainee, unsupported_by_megatron
from gsa_train.bench.step_bench import (
    OurTrainee,
    Trainee,
    over_ranks,
    peak_memory,
    random_batches,
    release_memory,
    reset_peak_memory,
    text_batches,
    time_steps,
)
from gsa_train.bench.step_trace import in_columns, trace_steps
from gsa_train.checkpoint.files import MEGATRON_METADATA
from gsa_train.config import Config, GSAConfig, PhaseConfig, load_config
from gsa_train.config.checks import check_packages
from gsa_train.config.file_checks import check_data
from gsa_train.config.load import ConfigError
from gsa_train.memory.estimate import estimate_memory
from gsa_train.model.flops import flops_per_token, mean_selected_keys, peak_flops_per_second
from gsa_train.parallel import Parallel, init_parallel, leave_layout
from gsa_train.profiling.step_breakdown import Breakdown

logger = logging.getLogger(__name__)

LEFT_OVER_BYTES = 64 * 2**20
"""More than this after a model is gone is a leak: cuBLAS keeps 32 MiB of workspace."""

LARGEST_DIFFERENCE_OF_KEYS = 0.01
"""Between two reports whose speeds are compared: it may change an efficiency by as much, and those are some percent."""


@dataclass(frozen=True)
class Variant:
    """A model in a layout."""

    name: str
    """Of the model: a config's name, or megatron's with its attention."""
    layout: str
    config: Config
    attention: str = ""
    """Of megatron-core's model; empty: the model is ours."""
    text: bool = False
    """Train on the first batch of the config's text instead of random tokens."""
    checkpoint: Path | None = None
    """Of a run of this model: its weights to start from, instead of new ones."""

    @property
    def phase(self) -> PhaseConfig:
        return self.config.phases[-1]

    def build(self, parallel: Parallel) -> Trainee:
        if self.attention:
            return MegatronTrainee(self.config, self.phase, parallel, self.attention)
        trainee = OurTrainee(self.config, self.phase, parallel)
        if self.checkpoint is not None:
            trainee.load(self.checkpoint)
        return trainee

    def batches(self, parallel: Parallel) -> list[MicroBatch]:
        """Of one step, on the device, and the same for every step."""
        return (text_batches if self.text else random_batches)(self.config, parallel)

    def mean_keys(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Keys that a query of the batches sees, and to how many of these it attends with a budget of k_base."""
        if self.attention:  # it knows no documents
            batches = [replace(batch, document_ids=None) for batch in batches]
        visible = torch.cat([batch.visible_keys() for batch in batches])
        mean_visible = float(visible.sum()) / visible.numel()
        if self.phase.attention == "dense":
            return mean_visible, mean_visible
        return mean_visible, mean_selected_keys(self.config.gsa, visible.tolist())


@dataclass
class Result:
    """Of one variant, over all ranks."""

    model: str
    layout: str
    world_size: int
    data_parallel: int = 0
    sequences: int = 0
    """Per optimizer step, over all ranks."""
    seq_len_tokens: int = 0
    num_layers: int = 0
    visible_keys: float = float("nan")
    """That a query sees, mean over the batch: less than half of a sequence where its documents end."""
    attended_keys: float = float("nan")
    """Of these, what `mfu` counts: all, or with sparse attention a budget of k_base and the local window."""
    step_ms: float = float("nan")
    """Median."""
    step_ms_low: float = float("nan")
    step_ms_high: float = float("nan")
    tokens_per_second_per_device: float = float("nan")
    mfu: float = float("nan")
    """Products of matrices of the model at hand over the device's peak, of attention those of `attended_keys`."""
    peak_gib: list[float] = field(default_factory=list)
    """Allocated, by rank."""
    peak_reserved_gib: list[float] = field(default_factory=list)
    predicted_gib: list[float] = field(default_factory=list)
    """What a dry run says, by rank; empty for megatron-core's model."""
    loss: float = float("nan")
    """Of the last step, on the same random tokens."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Milliseconds of a traced step on rank 0's device, see `step_trace.in_columns`; empty where none was traced."""
    exposed_communication_ms: list[float] = field(default_factory=list)
    """Of a traced step, by rank."""
    failed: str = ""
    """Why there are no figures."""

    @property
    def prediction_error(self) -> float:
        """Largest |predicted - peak| / peak over the ranks; NaN where there is none."""
        pairs = [(p, m) for p, m in zip(self.predicted_gib, self.peak_gib, strict=False) if m > 0]
        return max((abs(p - m) / m for p, m in pairs), default=float("nan"))


class VariantFailed(RuntimeError):
    """The process must end without waiting for other ranks."""

    def __init__(self, result: Result, speaks: bool) -> None:
        super().__init__(f"{result.model}, {result.layout}: {result.failed}")
        self.result = result
        self.speaks = speaks
        """This rank reports for all that failed."""


@dataclass(frozen=True)
class Sizes:
    """What the bench changes in every config."""

    sequences_per_device: int
    seq_len_tokens: int | None
    num_layers: int | None
    overrides: Sequence[str] = ()
    text: bool = False
    """The config's training text is there to be read."""

    def apply(self, path: Path, layout: str, world_size: int) -> Config:
        """
        Raises:
            ConfigError: the layout does not fit the config or the world.
        """
        fixed = [
            f"train.global_batch_size={self.sequences_per_device * world_size}",
            "data.num_workers=0",
            f"data.num_lanes={world_size}",
            "train.micro_batch_size=1",
        ]
        if self.seq_len_tokens is not None:
            fixed.append(f"train.seq_len_tokens={self.seq_len_tokens}")
        if self.num_layers is not None:
            fixed.append(f"model.num_layers={self.num_layers}")
        overrides = [*fixed, *layout_overrides(layout), *self.overrides]
        config = load_config(path, overrides, world_size=world_size, need_data=False)
        problems = check_packages(config)
        if self.text:  # to train on alone: nothing is validated
            problems += check_data(replace(config.data, validation_dir="", validation_sets={}))
        if problems:
            raise ConfigError(path, problems)
        return config


def variants(
    configs: Sequence[Path],
    megatron: Path | None,
    attentions: Sequence[str],
    layouts: Sequence[str],
    sizes: Sizes,
    world_size: int,
    checkpoints: Mapping[str, Path] | None = None,
) -> list[Variant]:
    """Layout by layout, so that each world is cut once.

    Args:
        checkpoints: of models by the names of their configs.

    Raises:
        ConfigError: a layout does not fit.
        ValueError: a checkpoint is of no config here, or is not there.
    """
    made, checkpoints = [], checkpoints or {}
    if unknown := checkpoints.keys() - {path.stem for path in configs}:
        raise ValueError(f"--checkpoint {sorted(unknown)[0]}=...: no such --config")
    for model, folder in checkpoints.items():
        if not (folder / MEGATRON_METADATA).exists():
            raise ValueError(f"--checkpoint {model}={folder}: no checkpoint; name a step_* folder of a run")
    for layout in layouts:
        for path in configs:
            config, checkpoint = sizes.apply(path, layout, world_size), checkpoints.get(path.stem)
            made.append(Variant(path.stem, layout, config, text=sizes.text, checkpoint=checkpoint))
        if megatron is not None:
            config = plain(sizes.apply(megatron, layout, world_size))
            made += [
                Variant(f"megatron ({each})", layout, config, each, text=sizes.text) for each in attentions
            ]
    return made


def plain(config: Config) -> Config:
    """Without gates and indexer, densely trained: what megatron-core's model is, and its operations are counted as."""
    gsa = GSAConfig(attention="dense", value_gate=False, output_gate=False)
    phase = replace(config.phases[-1], attention="dense", train="all")
    return replace(config, gsa=gsa, phases=[phase])


def run_variants(
    plan: Sequence[Variant], steps: int, warmup_steps: int, seed: int, traced_steps: int = 0
) -> Iterator[Result]:
    """Measure one after the other, on every rank alike. Everything of one is gone before the next begins.

    A variant that runs out of memory on all ranks, or that megatron-core cannot run, gives a result that says so.

    Args:
        traced_steps: after the measured ones, for `Result.breakdown`; needs CUDA devices.

    Raises:
        VariantFailed: this rank failed in a way that leaves the others waiting, or because another one did.
    """
    for number, variant in enumerate(plan):
        parallel = init_parallel(variant.config.parallel, seed)
        result = _result_of(variant, parallel)
        try:
            _measure(result, variant, number, parallel, steps, warmup_steps, traced_steps)
        except RankFailed as failure:
            result.failed = str(failure)
            raise VariantFailed(result, failure.speaks) from failure
        yield result
        left = release_memory(parallel.device)
        if left > LEFT_OVER_BYTES:
            logger.warning("%s, %s: %.2f GiB are still allocated", variant.name, variant.layout, left / 2**30)
        if number + 1 < len(plan):
            leave_layout()


def _result_of(variant: Variant, parallel: Parallel) -> Result:
    train = variant.config.train
    return Result(
        model=variant.name,
        layout=variant.layout,
        world_size=parallel.world_size,
        data_parallel=parallel.data_size,
        sequences=train.global_batch_size,
        seq_len_tokens=train.seq_len_tokens,
        num_layers=variant.config.model.num_layers,
    )


def _measure(
    result: Result,
    variant: Variant,
    number: int,
    parallel: Parallel,
    steps: int,
    warmup_steps: int,
    traced_steps: int,
) -> None:
    if variant.attention and (reason := unsupported_by_megatron(variant.config)):
        result.failed = reason
        return
    if not variant.attention:
        memory = estimate_memory(variant.config, variant.phase, parallel.world_size, parallel.pipeline_rank)
        result.predicted_gib = [row[0] for row in over_ranks([memory.total / 2**30], parallel)]
    release_memory(parallel.device)
    reset_peak_memory(parallel.device)
    out_of_memory = ""
    try:
        _fill(result, variant, parallel, steps, warmup_steps, traced_steps)
    except torch.OutOfMemoryError as error:
        out_of_memory = f"out of memory: {str(error).splitlines()[0]}"
    except RuntimeError as error:
        raise give_up(f"{type(error).__name__}: {error}", number, parallel) from error
    if out_of_memory:  # behind the handler, whose error holds on to the tensors
        result.failed = agree(out_of_memory, number, parallel)


def _fill(
    result: Result, variant: Variant, parallel: Parallel, steps: int, warmup_steps: int, traced_steps: int
) -> None:
    device = parallel.device
    batches = variant.batches(parallel)
    trainee = variant.build(parallel)
    try:
        for _ in range(warmup_steps):
            trainee.step(batches)
        reset_peak_memory(device)
        seconds = time_steps(lambda: trainee.step(batches), steps, device)
        peak = peak_memory(device)
        result.loss = trainee.loss()
        memory = (peak.allocated / 2**30, peak.reserved / 2**30)
        every = over_ranks([*memory, *variant.mean_keys(batches), *seconds], parallel)
        result.peak_gib = [row[0] for row in every]
        result.peak_reserved_gib = [row[1] for row in every]
        # All replicas have as many queries.
        result.visible_keys = statistics.fmean(row[2] for row in every)
        result.attended_keys = statistics.fmean(row[3] for row in every)
        _add_speed(result, variant, parallel, [row[4:] for row in every])
        if traced_steps:
            _add_breakdown(
                result, trace_steps(lambda: trainee.step(batches), traced_steps), traced_steps, parallel
            )
    finally:
        trainee.close()


def _add_speed(result: Result, variant: Variant, parallel: Parallel, seconds: list[list[float]]) -> None:
    """Of each rank's steps: what the slowest one takes."""
    config, device = variant.config, parallel.device
    slowest = [max(times) for times in zip(*seconds, strict=True)]
    result.step_ms = 1e3 * statistics.median(slowest)
    result.step_ms_low, result.step_ms_high = 1e3 * min(slowest), 1e3 * max(slowest)
    tokens = result.sequences * result.seq_len_tokens / parallel.world_size
    result.tokens_per_second_per_device = tokens / statistics.median(slowest)
    if device.type == "cuda":
        precision = "fp32" if config.train.precision == "fp32" else "bf16"
        rate = peak_flops_per_second(torch.cuda.get_device_name(device), precision)
        flops = flops_per_token(
            config.model,
            config.gsa,
            variant.phase,
            config.train.seq_len_tokens,
            result.attended_keys,
            result.visible_keys,
        )
        if rate is not None:
            result.mfu = result.tokens_per_second_per_device * flops.total / rate


def _add_breakdown(result: Result, traced: Breakdown, steps: int, parallel: Parallel) -> None:
    columns = in_columns(traced, steps)
    rows = over_ranks(list(columns.values()), parallel)
    by_rank = [dict(zip(columns, row, strict=True)) for row in rows]
    result.breakdown = by_rank[0]
    result.exposed_communication_ms = [each["exposed_communication_ms"] for each in by_rank]


def scaling(few: Sequence[dict[str, Any]], many: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Weak scaling: tokens per second and device of the same model and layout in the rows of two reports.

    Raises:
        ValueError: they have no model and layout in common, other work per device, or other documents.
    """
    rows = []
    for row in many:
        for other in few:
            if (row["model"], row["layout"]) != (other["model"], other["layout"]):
                continue
            work = [each["sequences"] * each["seq_len_tokens"] / each["world_size"] for each in (row, other)]
            if work[0] != work[1]:
                raise ValueError(
                    f"{row['model']}, {row['layout']}: {work[0]} and {work[1]} tokens per device and step; "
                    "measure both with the same --sequences-per-device and --seq-len"
                )
            speeds = row["tokens_per_second_per_device"], other["tokens_per_second_per_device"]
            if None in speeds:
                continue
            _refuse_other_documents(row, other)
            rows.append(
                {
                    "model": row["model"],
                    "layout": row["layout"],
                    "devices": f"{other['world_size']} -> {row['world_size']}",
                    "visible_keys": row["visible_keys"],
                    "tokens_per_second_per_device": speeds[0],
                    "efficiency": speeds[0] / speeds[1],
                }
            )
    if not rows:
        raise ValueError("the two reports have no model and layout in common")
    return rows


def _refuse_other_documents(row: dict[str, Any], other: dict[str, Any]) -> None:
    """A query that sees other keys is other work: a step of nothing else would take as many times as long."""
    before, now = other.get("visible_keys"), row.get("visible_keys")
    if before is None or now is None:
        raise ValueError(
            f"{row['model']}, {row['layout']}: a report does not say how many keys a query sees (visible_keys): "
            "it was written by an earlier version, measure it again"
        )
    if abs(before - now) > LARGEST_DIFFERENCE_OF_KEYS * min(before, now):
        raise ValueError(
            f"{row['model']}, {row['layout']}: a query sees {before:.1f} keys on {other['world_size']} devices and "
            f"{now:.1f} on {row['world_size']}, as their texts have other documents; measure both without --text, "
            "or with data.attend_across_documents=true"
        )


def as_row(result: Result) -> dict[str, Any]:
    """For the report: plain values, the ranks' lists as they are."""
    return {**asdict(result), "prediction_error": result.prediction_error}
