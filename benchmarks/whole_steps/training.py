"""Trains whole models, one after another, in one world of ranks, and measures the speed and memory of each model.

Models come from gsa_train and megatron-core (megatron_peer.py). A config sets the sizes of each model. Each model runs
in each layout (variants.py).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Sequence

import torch

from gsa_train.distributed.parallel import Parallel, init_parallel, leave_layout
from gsa_train.planning.memory.estimate import estimate_memory
from gsa_train.profiling.step_breakdown import Breakdown
from whole_steps.megatron_peer import MegatronTrainee, unsupported_by_megatron
from whole_steps.results import Result
from whole_steps.step_bench import (
    OurTrainee,
    over_ranks,
    random_batches,
    release_memory,
    speed,
    time_steps,
)
from whole_steps.step_trace import in_columns, trace_steps
from whole_steps.variants import Variant

logger = logging.getLogger(__name__)

LEFT_OVER_BYTES = 64 * 2**20
"""More memory than this after a model is released is a leak. cuBLAS keeps 32 MiB of workspace."""


def run_variants(
    plan: Sequence[Variant], steps: int, warmup_steps: int, seed: int, traced_steps: int = 0
) -> Iterator[Result]:
    """Measure the variants one after another on all ranks, and release each before the next one begins. If
    megatron-core cannot run a variant, the variant's result says so.

    Args:
        traced_steps: steps after the measured ones, for `Result.breakdown`; needs CUDA devices.
    """
    for number, variant in enumerate(plan):
        parallel = init_parallel(variant.config.parallel, seed)
        result = _result_of(variant, parallel)
        if variant.is_megatrons and (reason := unsupported_by_megatron(variant.config)):
            result.failed = reason
        else:
            _measure(result, variant, parallel, steps, warmup_steps, traced_steps)
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
    result: Result, variant: Variant, parallel: Parallel, steps: int, warmup_steps: int, traced_steps: int
) -> None:
    device, config = parallel.device, variant.config
    on_gpu = device.type == "cuda"
    if not variant.is_megatrons:
        memory = estimate_memory(config, variant.phase, parallel.world_size, parallel.pipeline_rank)
        result.predicted_gib = [row[0] for row in over_ranks([memory.total / 2**30], parallel)]
    batches = random_batches(config, parallel)
    trainee = (MegatronTrainee if variant.is_megatrons else OurTrainee)(config, variant.phase, parallel)
    try:
        for _ in range(warmup_steps):
            trainee.step(batches)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = time_steps(lambda: trainee.step(batches), steps, device)
        peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        gib = [peak(device) / 2**30 if on_gpu else 0.0 for peak in peaks]
        result.loss = trainee.loss()
        every = over_ranks([*gib, *seconds], parallel)
        result.peak_gib = [row[0] for row in every]
        result.peak_reserved_gib = [row[1] for row in every]
        _add_speed(result, variant, parallel, [row[2:] for row in every])
        if traced_steps:
            _add_breakdown(
                result, trace_steps(lambda: trainee.step(batches), traced_steps), traced_steps, parallel
            )
    finally:
        trainee.close()


def _add_speed(result: Result, variant: Variant, parallel: Parallel, seconds: list[list[float]]) -> None:
    """Add the speed, computed from the slowest rank's time in each step."""
    slowest = [max(times) for times in zip(*seconds, strict=True)]
    result.step_ms = 1e3 * statistics.median(slowest)
    result.step_ms_low, result.step_ms_high = 1e3 * min(slowest), 1e3 * max(slowest)
    seconds_of_step, devices = statistics.median(slowest), parallel.world_size
    result.tokens_per_second_per_device, result.mfu = speed(
        variant.config, variant.phase, seconds_of_step, parallel.device, devices
    )


def _add_breakdown(result: Result, traced: Breakdown, steps: int, parallel: Parallel) -> None:
    columns = in_columns(traced, steps)
    rows = over_ranks(list(columns.values()), parallel)
    by_rank = [dict(zip(columns, row, strict=True)) for row in rows]
    result.breakdown = by_rank[0]
    result.exposed_communication_ms = [each["exposed_communication_ms"] for each in by_rank]
