"""Report a dry run: layout, parameters, operations, time, memory, tokens and checkpoints.

Layout, parameters and tokens are exact. Operations per token come from model/flops.py, which counts only matrix
products, assumes that each query selects k_base keys, and ignores document boundaries. The memory of a training step is
an estimate by memory/, whose docstrings state its limits. In the memory table, `total` is the peak: `working` and
`logits` are never in use at once, so only the larger one counts. The time follows from the operations, the device's
peak rate, and a given or measured MFU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product

from gsa_train.arguments import DEVICE
from gsa_train.config import Config
from gsa_train.config.batch_ramp import batch_in_words, tokens_of_phases
from gsa_train.config.file_checks import check_files
from gsa_train.config.kernel_checks import unsupported_by_kernels
from gsa_train.config.moe import expert_layers
from gsa_train.config.parallel import data_parallel_size, stage_chunks, stage_layers
from gsa_train.metrics.goodput.words import table
from gsa_train.model.flops import (
    FlopsPerToken,
    count_parameters,
    flops_per_token,
    measured_mfu,
    peak_flops_per_second,
)
from gsa_train.planning.memory.estimate import checkpoint_bytes, estimate_memory, worst_expert_load

MAX_LAYOUT_LINES = 32
BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
OPERATIONS = {"1e12": 1e12, "1e9": 1e9, "1e6": 1e6, "1e3": 1e3}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def describe(config: Config, world_size: int, device: str = DEVICE, mfu: float | None = None) -> str:
    """Returns the report of a dry run, for a valid config on this world size.

    Args:
        device: the GPU, one of `gsa_train.model.flops.DEVICES`.
        mfu: share of the GPU's peak rate that training reaches; None: as measured on such a device.
    """
    counts = _flops_by_phase(config)
    operations = _unit(max(count.total for count in counts), OPERATIONS)
    memory = _unit(_peak_bytes(config, world_size), BYTES)
    checkpoint_size = max(checkpoint_bytes(config, phase) for phase in config.phases)
    checkpoint = _unit(checkpoint_size, BYTES)
    operation_lines = _flops(config, counts, OPERATIONS[operations])
    sections = {
        "Layout": _layout(config, world_size),
        "Parameters": _parameters(config),
        "Tokens": _tokens(config),
        f"Floating-point operations per token (training, in {operations})": operation_lines,
        f"Time on {world_size} x {device}": _time(config, counts, world_size, device, mfu),
        f"Memory per rank (in {memory})": _memory(config, world_size, BYTES[memory]),
        f"Checkpoint (in {checkpoint})": _checkpoint(config, world_size, checkpoint_size / BYTES[checkpoint]),
        "Data": check_files(config) or ["the local files are there"],
    }
    title = f"{config.run.name} on {world_size} {'rank' if world_size == 1 else 'ranks'}"
    blocks = ["\n  ".join([name, *lines]) for name, lines in sections.items()]
    return "\n\n".join([title, *blocks])


# ---- layout, parameters, tokens, operations


def _layout(config: Config, world_size: int) -> list[str]:
    parallel, train = config.parallel, config.train
    replicas = data_parallel_size(config, world_size)
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    over = "data- and context-parallel" if parallel.context > 1 else "data-parallel"
    sharded = f"sharded over {over} ranks" if parallel.distributed_optimizer else "replicated"
    if parallel.optimizer_instances > 1:
        sharded += f", in {parallel.optimizer_instances} instances"
    if parallel.strategy == "deepspeed":
        sharded += f" by DeepSpeed's ZeRO-{parallel.zero_stage}"
    in_sequence = "on" if parallel.sequence and parallel.tensor > 1 else "off"
    lines = [
        f"{world_size} = tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline} "
        f"x data {replicas}",
        f"sequence parallel {in_sequence}, optimizer state {sharded}",
        f"{_layers_per_stage(config)}; {micro_batches} micro-batches of {train.micro_batch_size} sequences per "
        "step and replica",
    ]
    if config.moe.experts:
        lines.append(_experts(config, world_size))
    ranks = []
    for stage in range(parallel.pipeline):
        spans = ", ".join(_span(chunk) for chunk in stage_chunks(config, stage))
        span = f"stage {stage} (layers {spans})"
        for replica in range(replicas):
            first = rank_of(config, world_size, tensor=0, context=0, pipeline=stage, data=replica)
            ranks.append(f"{span}, data {replica}: {_rank_range(first, parallel.tensor, parallel.context)}")
    if len(ranks) > MAX_LAYOUT_LINES:
        ranks = [*ranks[:MAX_LAYOUT_LINES], f"... and {len(ranks) - MAX_LAYOUT_LINES} more in the same order"]
    return lines + ranks


def _experts(config: Config, world_size: int) -> str:
    moe, parallel = config.moe, config.parallel
    replicas = world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
    split = f", each split over {parallel.expert_tensor}" if parallel.expert_tensor > 1 else ""
    copies = "1 replica" if replicas == 1 else f"{replicas} replicas"
    return (
        f"{len(expert_layers(config))} layers with {moe.experts} experts, top {moe.top_k}: "
        f"{moe.experts // parallel.expert} on a rank{split}, in {copies}"
    )


def _layers_per_stage(config: Config) -> str:
    virtual = config.parallel.virtual_pipeline
    chunks = f" in {virtual} chunks (interleaved)" if virtual > 1 else ""
    counts = [len(stage_layers(config, stage)) for stage in range(config.parallel.pipeline)]
    layers = f"{counts[0]} layers per stage" if len(set(counts)) == 1 else f"{counts} layers on the stages"
    return layers + chunks


def _span(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def rank_of(config: Config, world_size: int, tensor: int, context: int, pipeline: int, data: int) -> int:
    """Returns the global rank of a place in the layout, in megatron-core's order: tensor fastest, then context, data,
    pipeline."""
    replicas, parallel = data_parallel_size(config, world_size), config.parallel
    return tensor + parallel.tensor * (context + parallel.context * (data + replicas * pipeline))


def _rank_range(first: int, tensor: int, context: int) -> str:
    if tensor * context == 1:
        return f"rank {first}"
    axes = {"tensor": tensor, "context": context}
    places = ", ".join(f"{axis} 0-{size - 1}" for axis, size in axes.items() if size > 1)
    return f"ranks {first}-{first + tensor * context - 1} ({places})"


def _parameters(config: Config) -> list[str]:
    count = count_parameters(config.model, config.gsa, config.moe)
    experts = ("router", "experts", "shared_experts", "idle")
    parts = [part for part in asdict(count) if part not in experts or (count.experts and part != "idle")]
    rows = [[part.replace("_", " "), f"{getattr(count, part):,}"] for part in parts]
    rows += [["total", f"{count.total:,}"]]
    if count.experts:
        rows += [["active in a token", f"{count.active:,}"]]
    overhead = f"gates and indexer add {count.overhead:,} ({count.overhead_percent:.2f}%) to the plain model"
    return [*table(rows), overhead]


def _tokens(config: Config) -> list[str]:
    train, tokens = config.train, tokens_of_phases(config)
    rows = [["phase", "steps", "tokens", "attention", "trains"]]
    rows += [
        [phase.name, f"{phase.steps:,}", f"{count:,}", phase.attention, phase.train]
        for phase, count in zip(config.phases, tokens, strict=True)
    ]
    rows += [["total", f"{sum(phase.steps for phase in config.phases):,}", f"{sum(tokens):,}", "", ""]]
    ramp = [f"sequences per step: {batch_in_words(train)}"] if train.batch_ramp else []
    return [f"{train.global_batch_size * train.seq_len_tokens:,} tokens per step", *ramp, *table(rows)]


def _flops_by_phase(config: Config) -> list[FlopsPerToken]:
    return [
        flops_per_token(config.model, config.gsa, config.moe, phase, config.train.seq_len_tokens)
        for phase in config.phases
    ]


def training_operations(config: Config) -> float:
    counts = _flops_by_phase(config)
    return sum(tokens * count.total for tokens, count in zip(tokens_of_phases(config), counts, strict=True))


def _flops(config: Config, counts: Sequence[FlopsPerToken], unit: float) -> list[str]:
    rows = [["part", *(phase.name for phase in config.phases)]]
    rows += [
        [part, *(f"{asdict(count)[part] / unit:.3f}" for count in counts)]
        for part in asdict(counts[0])
        if part != "dense_equivalent" and (part not in ("router", "experts") or config.moe.experts)
    ]
    rows += [["total", *(f"{count.total / unit:.3f}" for count in counts)]]
    rows += [["dense equivalent", *(f"{count.dense_equivalent / unit:.3f}" for count in counts)]]
    return table(rows)


def _time(
    config: Config, counts: Sequence[FlopsPerToken], world_size: int, device: str, mfu: float | None
) -> list[str]:
    count = count_parameters(config.model, config.gsa, config.moe)
    peak, measured = peak_flops_per_second(device, "bf16"), measured_mfu(device, count)
    if peak is None:
        remedy = "give one of gsa_train.model.flops.DEVICES"
        raise ValueError(f"device {device!r}: its peak rate is not known; {remedy}")
    if mfu is None and measured is None:
        with_experts = " with experts" if count.experts else ""
        return [
            f"give --mfu, such as --mfu 0.3: none has been measured for {count.total:,} parameters{with_experts} on "
            "this device"
        ]
    if mfu is None and plain_torch_reasons(config):
        return ["give --mfu: attention runs in plain torch (see Memory), whose speed has not been measured"]
    share = measured if mfu is None else mfu
    assert share is not None
    of_ours = "measured for 1.7B parameters at 4096 tokens (--mfu, --device: others)"
    source = of_ours if mfu is None else "as given"
    tokens = tokens_of_phases(config)
    rates = [world_size * peak * share / count.total for count in counts]
    seconds = [count / rate for count, rate in zip(tokens, rates, strict=True)]
    unit = _unit(sum(seconds), TIMES)

    def row(name: str, rate: float, time: float) -> list[str]:
        return [name, f"{rate:,.0f}", f"{time / TIMES[unit]:.3g}", f"{world_size * time / 86_400:.3g}"]

    rows = [["phase", "tokens/s", unit, "GPU-days"]]
    rows += [row(phase.name, *told) for phase, *told in zip(config.phases, rates, seconds, strict=True)]
    rows += [row("total", sum(tokens) / sum(seconds), sum(seconds))]
    return [f"MFU {100 * share:.3g}% of {peak / 1e12:,.0f} TFLOP/s (bf16): {source}", *table(rows)]


# ---- memory


def _memory(config: Config, world_size: int, unit: int) -> list[str]:
    rows: list[list[str]] = []
    for phase in config.phases:
        for stage in range(config.parallel.pipeline):
            estimate = estimate_memory(config, phase, world_size, stage)
            parts = asdict(estimate) | {"total": estimate.total}
            rows = rows or [["phase", "stage", *parts]]
            rows.append([phase.name, str(stage), *(f"{part / unit:.2f}" for part in parts.values())])
    reasons = plain_torch_reasons(config)
    plain = [f"attention in plain torch, with L x L tensors: {reason}" for reason in reasons]
    kernel = ""
    if config.gsa.attention == "sparse" and not reasons:
        chosen = config.gsa.kernel_for(config.train.seq_len_tokens, config.train.cuda_graphs)
        kernel = f"; sparse attention: {chosen}"
    recompute = f"recompute: {config.train.recompute}{kernel}{_uneven_loads(config, world_size, unit)}"
    return [*plain, recompute, *table(rows)]


def _uneven_loads(config: Config, world_size: int, unit: int) -> str:
    if config.moe.experts == 0 or config.parallel.expert == 1:
        return ""
    more = max(worst_expert_load(config, world_size, stage) for stage in range(config.parallel.pipeline))
    return (
        f"; loads of experts even: {more / unit:.2f} more where one rank's get all tokens of all its layers"
    )


def plain_torch_reasons(config: Config) -> list[str]:
    """Returns why a GPU run does not use the fused attention kernels, or an empty list if it does."""
    if config.gsa.attention_impl == "reference":
        return ["gsa.attention_impl = reference"]
    return unsupported_by_kernels(config)


def _peak_bytes(config: Config, world_size: int) -> float:
    places = product(config.phases, range(config.parallel.pipeline))
    return max(estimate_memory(config, phase, world_size, stage).total for phase, stage in places)


def _checkpoint(config: Config, world_size: int, size: float) -> list[str]:
    share = f"about {size / world_size:.2f} of each rank's host memory"
    if config.checkpoint.async_save:  # gsa_train/checkpoint/host_memory.py
        return [
            f"{size:.2f}; for the copies {share},",
            "on GPUs pinned from the first steps on, and up to 0.25 GiB or one largest tensor more",
        ]
    return [f"{size:.2f}; while it is written, {share}"]


def _unit(largest: float, units: Mapping[str, float]) -> str:
    """Returns the largest unit that is at most this number, else the smallest unit."""
    return next((name for name, size in units.items() if largest >= size), list(units)[-1])
