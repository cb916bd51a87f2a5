"""`train.*`: batches, precision, memory, objective and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TrainConfig:
    seq_len_tokens: int = 256
    """Tokens per sequence."""
    micro_batch_size: int = 1
    """Sequences per forward pass of one data-parallel replica."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of weights and activations. `auto`: bf16 on GPUs, fp32 on CPUs. With bf16 the optimizer keeps fp32
    weights."""
    fused_ops: Literal["auto", "triton", "none"] = "auto"
    """`triton`: SwiGLU, cross-entropy, and split + rotary embedding + G2 (heads of 32, 64, 128 or 256, with
    rotary_percent 1 and without qk_norm) as one kernel for each pass, and with bf16 weights gradients added in fp32 by
    their matrix product. `none`: megatron-core's operations, one by one. `auto`: `triton` on GPUs."""
    cuda_graphs: bool = False
    """Run the forward and backward pass over a micro-batch as a CUDA graph, so that the host's launches do not bind:
    every bit is the same. Logged steps, validation and phases that train the indexer alone run without, and need the
    memory of a pass beside the graph's. Not with tensor, context, pipeline or expert parallelism, nor with
    recomputation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again to save memory: none, the attention core (`selective`), or
    whole layers (`full`)."""
    recompute_num_layers: int = 1
    """Layers that are recomputed together, with recompute=full."""
    linear_layers: str = "megatron"
    """What multiplies by the matrices of attention and feed-forward layers: `megatron`, megatron-core's layers in the
    working precision."""
    objective: str = "cross_entropy"
    """Loss of a token in training: `cross_entropy`. Validation always scores the cross-entropy."""
    optimizer: str = "adamw"
    """What updates the weights: `adamw`."""
    weight_decay: float = 0.1
    """Weight decay of the optimizer; norms and biases have none."""
    adam_beta1: float = 0.9
    """AdamW: decay per step of the first moment."""
    adam_beta2: float = 0.95
    """AdamW: decay per step of the second moment."""
    adam_epsilon: float = 1e-8
    """AdamW: epsilon added to the root of the second moment."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1 as in the metrics, whose batches are read and not trained on. Step number and learning
    rate go on."""
