"""`parallel.*`: the layout over ranks, and the optimizer's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks."""
    sequence: bool = True
    """Sequence parallelism over the tensor-parallel ranks (no effect with tensor=1)."""
    context: int = 1
    """Context-parallel ranks: each holds `context_chunks` chunks of every sequence and sees the keys of all of it."""
    context_chunks: int = 2
    """Even. With 2 all ranks have the same causal work. More bring their work over selected keys and their memory
    nearer to each other, for more launches."""
    pipeline: int = 1
    """Pipeline stages (1F1B). What is left of the world after tensor x context x pipeline is data parallel."""
    virtual_pipeline: int = 1
    """Model chunks per stage (interleaved 1F1B): stages wait less and send more. Above 1 the micro-batches of a step
    must be a multiple of `pipeline`."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each chunk in the order of the model, pipeline x virtual_pipeline numbers; chunk i goes to stage
    i % pipeline. Empty: all the same. The first chunk also has the embedding, the last one the output and the loss."""
    strategy: Literal["megatron", "deepspeed"] = "megatron"
    """Who holds gradients and optimizer state of the data-parallel ranks: megatron-core, or DeepSpeed's ZeRO
    (`pip install 'gsa-train[deepspeed]'`; with `tensor` and `sequence`, without `context` and `pipeline`)."""
    zero_stage: int = 1
    """With strategy=deepspeed, what is sharded: 1 the optimizer state, 2 the gradients, too, 3 the weights, too."""
    offload_optimizer: bool = False
    """With strategy=deepspeed: fp32 weights and moments are in host memory, and its CPUs update them (give each rank
    OMP_NUM_THREADS). On CPUs it only changes the code that runs."""
    distributed_optimizer: bool = True
    """With strategy=megatron: shard the optimizer state over the data-parallel ranks."""
    optimizer_instances: int = 1
    """With distributed_optimizer: groups of data x context ranks, each with a whole optimizer state, sharded within
    (HSDP): more memory, and only reduced gradients pass between them. A divisor of data x context."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are added up in, over micro-batches and over ranks. `bf16` halves their memory and traffic and
    rounds each sum; it needs weights in bf16."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass (phases that train the base)."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the forward pass; needs distributed_optimizer and overlap_grad_reduce."""
    timeout_minutes: float = 10.0
    """A collective that takes longer has failed, and so has a rank that shows no progress for so long: the run ends
    with an error and names it. Above the longest compilation, save, or 32 micro-batches of a validation."""
