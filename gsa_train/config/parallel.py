"""`parallel.*`: the layout over ranks, and the optimizer's sharding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gsa_train.config.load import problem_line

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks, which split heads, feed-forward width and vocabulary."""
    sequence: bool = True
    """Sequence parallelism over the tensor-parallel ranks. It has no effect with tensor=1."""
    context: int = 1
    """Context-parallel ranks. Each holds `context_chunks` chunks of every sequence and attends to the keys of the
    whole sequence."""
    context_chunks: int = 2
    """Chunks of a sequence on each context-parallel rank, an even number. With 2, all ranks have the same work in dense
    attention. More chunks also balance work and memory in sparse attention, but need more kernel launches."""
    pipeline: int = 1
    """Pipeline stages (1F1B). The ranks left after tensor x context x pipeline are data parallel."""
    virtual_pipeline: int = 1
    """Model chunks per stage (interleaved 1F1B). With more chunks, stages wait less and send more. Above 1, the number
    of micro-batches of a step must be a multiple of `pipeline`."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Number of layers of each model chunk, in model order: pipeline x virtual_pipeline numbers. Chunk i belongs to
    stage i % pipeline. Empty: all chunks have the same number of layers. The first chunk also holds the embedding, and
    the last chunk the output layer and the loss."""
    expert: int = 1
    """Expert-parallel ranks (`moe`), which exchange tokens. Each holds `moe.experts` / `expert` experts of every layer.
    They are neighbours among the tensor x context x data ranks of a pipeline stage."""
    expert_tensor: int = 1
    """Ranks that split the width of each expert: 1, or `tensor`. With 1 each expert is whole, even if `tensor` splits
    everything else."""
    strategy: Literal["megatron", "deepspeed"] = "megatron"
    """How gradients and optimizer state are sharded over the data-parallel ranks: by megatron-core, or by DeepSpeed's
    ZeRO (extra `deepspeed`). ZeRO combines with `tensor` and `sequence`, but not with `context` and `pipeline`."""
    zero_stage: int = 1
    """With strategy=deepspeed, what is sharded. 1: the optimizer state. 2: also the gradients. 3: also the weights."""
    offload_optimizer: bool = False
    """With strategy=deepspeed, keep the optimizer's fp32 weights and moments in host memory, where the CPUs update
    them. Set OMP_NUM_THREADS for each rank. Saves no memory in a run on CPUs."""
    distributed_optimizer: bool = True
    """With strategy=megatron: shard the optimizer state over the data-parallel ranks."""
    optimizer_instances: int = 1
    """With distributed_optimizer, number of groups that divide the data x context ranks evenly (HSDP). Each group
    shards a whole optimizer state over its ranks. More groups take more memory, but exchange only reduced gradients."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over micro-batches and ranks. `bf16` halves their memory and traffic, rounds
    each sum, and needs bf16 weights."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass, in phases that train the base."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the forward pass. It needs distributed_optimizer and overlap_grad_reduce."""
    timeout_minutes: float = 10.0
    """Minutes after which a collective fails, and a rank without progress counts as hanging. The run then ends with an
    error that names the rank. Choose more than the longest compilation, save, or 32 micro-batches of validation.
    Training steps have the shorter limit `hang_limit_seconds`."""
    hang_limit_seconds: float = 0.0
    """Seconds without progress after which a step hangs, at most `timeout_minutes`. 0: five times the slowest of the
    last 32 steps, at least 40 seconds. Other work has the limit `timeout_minutes`: the start, a phase's first steps,
    compilation, reading text, logs, validation, tasks, saves and the end."""


def chunk_layers(config: Config) -> list[int]:
    """Return the number of layers of each model chunk, in model order. If the sizes do not fit (see `check_layout`),
    return an empty list.

    In interleaved 1F1B, stage i % pipeline holds chunk i of the model, as its own chunk i // pipeline.
    """
    parallel, layers = config.parallel, config.model.num_layers
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if min(layers, parallel.pipeline, parallel.virtual_pipeline) < 1:
        return []
    given = parallel.pipeline_layers
    if given:
        fits = len(given) == chunks and min(given) > 0 and sum(given) == layers
        return list(given) if fits else []
    return [layers // chunks] * chunks if layers % chunks == 0 else []


def stage_chunks(config: Config, stage: int) -> list[range]:
    """Return the layers (from 0) of each chunk that a stage holds."""
    counts = chunk_layers(config)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return spans[stage :: config.parallel.pipeline]


def stage_layers(config: Config, stage: int) -> list[int]:
    """Return all layers (from 0) that a stage holds."""
    return [layer for chunk in stage_chunks(config, stage) for layer in chunk]


MOST_TOKENS_PER_STEP = 10**9  # sixteen times DeepSeek-V3's 63M (arXiv 2412.19437, 15,360 sequences of 4096)


def check_layout(config: Config, world_size: int) -> Iterator[str]:
    """Yield mistakes in `parallel`, and in sizes that it must divide."""
    yield from _check_sizes(config, world_size)
    yield from _check_strategy(config)
    yield from _check_instances(config, world_size)
    yield from _check_context(config)
    yield from _check_pipeline(config, world_size)
    yield from _check_batch(config, world_size)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the data-parallel ranks of a world that the model-parallel sizes divide, or 0 if they do not."""
    sizes = _model_sizes(config)
    unit = math.prod(sizes.values())
    if min(*sizes.values(), world_size) < 1 or world_size % unit != 0:
        return 0
    return world_size // unit


def _model_sizes(config: Config) -> dict[str, int]:
    """Return the ranks that share one sequence, by field. The rest of the world is data parallel."""
    parallel = config.parallel
    return {
        "parallel.tensor": parallel.tensor,
        "parallel.context": parallel.context,
        "parallel.pipeline": parallel.pipeline,
    }


def nearest(value: int, unit: int) -> str:
    """Return the multiples of `unit` next to `value`, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(below + unit)


def undivided_chunk(config: Config, unit: int) -> int:
    """Return the number of layers of the first chunk where `unit` does not divide it, or 0."""
    return next((layers for layers in chunk_layers(config) if unit > 0 and layers % unit != 0), 0)


def chunk_in_words(config: Config) -> str:
    parallel = config.parallel
    if parallel.pipeline_layers:
        return "a chunk (parallel.pipeline_layers)"
    if parallel.virtual_pipeline > 1:
        return "a chunk (model.num_layers / parallel.pipeline / parallel.virtual_pipeline)"
    return "a stage (model.num_layers / parallel.pipeline)"


def _check_sizes(config: Config, world_size: int) -> Iterator[str]:
    parallel, sizes = config.parallel, _model_sizes(config)
    unit = math.prod(sizes.values())
    if world_size < 1:
        yield problem_line("world size", world_size, "below 1", "start 1 rank or more")
    elif unit > 0 and world_size % unit != 0:
        wrong = f"not a multiple of {' x '.join(f'{field} = {size}' for field, size in sizes.items())}"
        remedy = f"start {nearest(world_size, unit)} ranks (a dry run: --world-size), or change the sizes"
        yield problem_line("world size", world_size, wrong, remedy)
    if parallel.grad_reduce_dtype == "bf16" and config.train.precision == "fp32":
        wrong = "gradients have the weights' precision, and train.precision = fp32"
        yield config.problem(
            "parallel.grad_reduce_dtype", wrong, "set it to fp32, or train.precision to bf16"
        )
    needed = parallel.distributed_optimizer, parallel.overlap_grad_reduce
    if parallel.overlap_param_gather and not all(needed):
        optimizer, reduce = (str(each).lower() for each in needed)
        wrong = (
            f"needs parallel.distributed_optimizer = {optimizer} and parallel.overlap_grad_reduce = {reduce} to be "
            "true"
        )
        remedy = "set both to true, or overlap_param_gather to false"
        yield config.problem("parallel.overlap_param_gather", wrong, remedy)


def _check_strategy(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.strategy == "megatron":
        if parallel.zero_stage != 1:
            wrong = "only DeepSpeed has stages, and parallel.strategy = megatron"
            remedy = "set parallel.strategy to deepspeed, or leave zero_stage out"
            yield config.problem("parallel.zero_stage", wrong, remedy)
        if parallel.offload_optimizer:
            wrong = "only DeepSpeed's optimizer works in host memory here, and parallel.strategy = megatron"
            remedy = "set parallel.strategy to deepspeed, or offload_optimizer to false"
            yield config.problem("parallel.offload_optimizer", wrong, remedy)
        return
    if parallel.zero_stage > 3:
        yield config.problem("parallel.zero_stage", "not 1, 2 or 3", "choose one of these")
    with_deepspeed, megatron = "parallel.strategy = deepspeed", "or parallel.strategy to megatron"
    for name in ("context", "pipeline", "virtual_pipeline"):
        if getattr(parallel, name) > 1:
            wrong = f"not with {with_deepspeed}, whose ranks are tensor x data parallel"
            yield config.problem(f"parallel.{name}", wrong, f"set it to 1, {megatron}")
    if not parallel.distributed_optimizer:
        wrong = f"{with_deepspeed} always shards the optimizer state"
        yield config.problem("parallel.distributed_optimizer", wrong, f"set it to true, {megatron}")
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(parallel, name):
            wrong = f"{with_deepspeed} overlaps by itself"
            yield config.problem(f"parallel.{name}", wrong, f"set it to false, {megatron}")


def _check_instances(config: Config, world_size: int) -> Iterator[str]:
    parallel, field = config.parallel, "parallel.optimizer_instances"
    if parallel.optimizer_instances < 2:
        return
    if parallel.strategy == "deepspeed":
        wrong = "only megatron-core has instances, and parallel.strategy = deepspeed"
        yield config.problem(field, wrong, "set it to 1, or parallel.strategy to megatron")
    elif not parallel.distributed_optimizer:
        wrong = "parallel.distributed_optimizer = false, so every rank holds the whole state already"
        yield config.problem(field, wrong, "set it to 1, or distributed_optimizer to true")
    ranks = data_parallel_size(config, world_size) * parallel.context
    if ranks % parallel.optimizer_instances != 0:
        wrong = f"does not divide the {ranks} data x context ranks"
        yield config.problem(field, wrong, f"choose a divisor of {ranks}")


def _check_context(config: Config) -> Iterator[str]:
    """Check that each context-parallel rank holds whole chunks, which sequence parallelism divides evenly."""
    length = config.train.seq_len_tokens
    context, tensor, chunks = config.parallel.context, config.parallel.tensor, config.parallel.context_chunks
    if chunks < 2 or chunks % 2 != 0:
        remedy = f"set it to an even number, such as {max(2, chunks + chunks % 2)}"
        yield config.problem("parallel.context_chunks", "is not an even number of chunks", remedy)
    elif context > 1 and length > 0 and tensor > 0:
        shares = math.lcm(chunks, tensor if config.parallel.sequence else 1)
        unit = context * shares
        if length % unit != 0:
            wrong = (
                f"not a multiple of {unit}: each of parallel.context = {context} ranks holds {chunks} chunks"
            )
            wrong += f", split over parallel.tensor = {tensor} ranks" if shares > chunks else ""
            remedy = f"set it to {nearest(length, unit)}, or change parallel.context"
            yield config.problem("train.seq_len_tokens", wrong, remedy)


def _check_pipeline(config: Config, world_size: int) -> Iterator[str]:
    """Check that layers fill the chunks, and micro-batches fill an interleaved schedule."""
    parallel, layers = config.parallel, config.model.num_layers
    stages, virtual, given = parallel.pipeline, parallel.virtual_pipeline, parallel.pipeline_layers
    if min(stages, virtual, layers) < 1:
        return
    chunks = stages * virtual
    in_words = f"parallel.pipeline = {stages}"
    if virtual > 1:
        in_words += f" x parallel.virtual_pipeline = {virtual}"
    if virtual > 1 and stages == 1:
        wrong = "chunks are interleaved over stages, and parallel.pipeline = 1"
        yield config.problem("parallel.virtual_pipeline", wrong, "set it to 1, or parallel.pipeline above 1")
    if given and not chunk_layers(config):
        found = f"{len(given)} numbers with the sum {sum(given)}, the smallest {min(given)}"
        remedy = f"give {chunks} numbers of at least 1 ({in_words}) with the sum {layers} (model.num_layers)"
        yield config.problem("parallel.pipeline_layers", found, remedy)
    elif not given and layers % chunks != 0:
        remedy = (
            f"set model.num_layers to {nearest(layers, chunks)}, or name each chunk's layers in "
            "parallel.pipeline_layers"
        )
        yield config.problem("model.num_layers", f"not a multiple of {in_words}", remedy)
    unit = config.train.micro_batch_size * data_parallel_size(config, world_size)
    for name in _batch_fields(config):
        size = config.value_of(name)
        if virtual > 1 and unit > 0 and size % unit == 0 and size // unit % stages != 0:
            wrong = (
                f"{size // unit} micro-batches per step and replica are not a multiple of parallel.pipeline = "
                f"{stages}, as parallel.virtual_pipeline = {virtual} needs"
            )
            yield config.problem(name, wrong, f"set it to {nearest(size, unit * stages)}")


def _check_batch(config: Config, world_size: int) -> Iterator[str]:
    length, micro_batch_size = config.train.seq_len_tokens, config.train.micro_batch_size
    replicas = data_parallel_size(config, world_size)
    unit = micro_batch_size * replicas
    tokens = config.train.global_batch_size * length
    if length > MOST_TOKENS_PER_STEP:
        remedy = f"give at most {MOST_TOKENS_PER_STEP}"
        yield config.problem("train.seq_len_tokens", "more than a whole step may have", remedy)
        return
    if length > 0 and tokens > MOST_TOKENS_PER_STEP:
        wrong = f"sequences of {length} tokens: {tokens:.3g} tokens per step"
        remedy = f"count sequences, not tokens: at most {MOST_TOKENS_PER_STEP // length}"
        yield config.problem("train.global_batch_size", wrong, remedy)
        return
    for name in _batch_fields(config):
        size = config.value_of(name)
        if size > 0 and unit > 0 and size % unit != 0:
            wrong = (
                f"not a multiple of train.micro_batch_size = {micro_batch_size} x {replicas} data-parallel ranks "
                "(world size / parallel.tensor / parallel.context / parallel.pipeline)"
            )
            remedy = f"set it to {nearest(size, unit)}"
            if size % replicas == 0:
                remedy += f", or train.micro_batch_size to {math.gcd(micro_batch_size, size // replicas)}"
            yield config.problem(name, wrong, remedy)


def _batch_fields(config: Config) -> list[str]:
    """Return the field of each batch size that steps have."""
    stages = range(len(config.train.batch_ramp))
    return ["train.global_batch_size", *(f"train.batch_ramp.{each}.global_batch_size" for each in stages)]
