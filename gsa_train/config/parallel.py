"""`parallel.*`: the layout over ranks, and the optimizer's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks: heads, feed-forward width and vocabulary are split over them."""
    sequence: bool = True
    """Sequence parallelism over the tensor-parallel ranks (no effect with tensor=1)."""
    context: int = 1
    """Context-parallel ranks: each holds `context_chunks` chunks of every sequence and attends to the keys of all of
    it."""
    context_chunks: int = 2
    """Chunks of a sequence on each context-parallel rank; even. With 2 all ranks have the same causal work. More
    chunks even out the work and memory over selected keys, for more kernel launches."""
    pipeline: int = 1
    """Pipeline stages (1F1B). The ranks left after tensor x context x pipeline are data parallel."""
    virtual_pipeline: int = 1
    """Model chunks per stage (interleaved 1F1B): stages wait less and send more. Above 1 the micro-batches of a step
    must be a multiple of `pipeline`."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each model chunk in the order of the model, pipeline x virtual_pipeline numbers; chunk i goes to stage
    i % pipeline. Empty: all chunks have the same number. The first chunk also holds the embedding, the last one the
    output layer and the loss."""
    expert: int = 1
    """Expert-parallel ranks (`moe`): each holds experts / expert of every layer's. They are neighbours among the
    tensor x context x data ranks of a stage, and send each other the tokens of their experts."""
    expert_tensor: int = 1
    """Ranks that split the width of each expert: 1, or `tensor`. With 1 an expert is whole, also where `tensor` splits
    everything else."""
    strategy: Literal["megatron", "deepspeed"] = "megatron"
    """What shards gradients and optimizer state over the data-parallel ranks: megatron-core, or DeepSpeed's ZeRO
    (extra `deepspeed`), which goes with `tensor` and `sequence` and not with `context` and `pipeline`."""
    zero_stage: int = 1
    """With strategy=deepspeed, what is sharded: 1 the optimizer state; 2 also the gradients; 3 also the weights."""
    offload_optimizer: bool = False
    """With strategy=deepspeed: keep the optimizer's fp32 weights and moments in host memory, where the CPUs update
    them; give each rank OMP_NUM_THREADS. A run on CPUs saves no memory by it."""
    distributed_optimizer: bool = True
    """With strategy=megatron: shard the optimizer state over the data-parallel ranks."""
    optimizer_instances: int = 1
    """With distributed_optimizer: number of groups of data x context ranks that each hold a whole optimizer state,
    sharded within the group (HSDP). This takes more memory, and only reduced gradients pass between groups. A divisor
    of data x context."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over micro-batches and over ranks. `bf16` halves their memory and traffic and
    rounds each sum; it needs weights in bf16."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass, in phases that train the base."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the forward pass; needs distributed_optimizer and overlap_grad_reduce."""
    timeout_minutes: float = 10.0
    """Minutes after which a collective has failed, and after which a rank without progress counts as hanging: the run
    ends with an error that names the rank. Choose more than the longest compilation, save, or 32 micro-batches of a
    validation takes. Within steps `hang_limit_seconds` says so earlier."""
    hang_limit_seconds: float = 0.0
    """Seconds without progress after which a step hangs. 0: five times the slowest of the last 32 steps, at least 40.
    Never more than `timeout_minutes`, which all else has: the start, the first steps of a phase and other compilation,
    reading text, logs, validation, tasks, saves and the end."""
