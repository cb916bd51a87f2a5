"""`train.*`: batches, precision, memory and AdamW."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TrainConfig:
    seq_len_tokens: int = 256
    """Tokens per sequence."""
    micro_batch_size: int = 1
    """Sequences per forward pass and data-parallel replica."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """`auto`: bf16 on GPUs, fp32 on CPUs. With bf16 the optimizer keeps fp32 weights."""
    fused_ops: Literal["auto", "triton", "none"] = "auto"
    """SwiGLU, cross-entropy, and split + rotary embedding + G2 (heads of 32, 64 or 128 without qk_norm) as one Triton
    kernel each way; with bf16 weight gradients added in fp32 by their matrix product. `auto`: on GPUs; `none`:
    megatron-core's operations, one by one."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, the attention core, or whole layers."""
    recompute_num_layers: int = 1
    """Layers per recomputed unit with recompute=full."""
    weight_decay: float = 0.1
    """AdamW weight decay; norms and biases have none."""
    adam_beta1: float = 0.9
    """AdamW beta 1."""
    adam_beta2: float = 0.95
    """AdamW beta 2."""
    adam_epsilon: float = 1e-8
    """AdamW epsilon."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1 as in the metrics, whose batches are read but not trained on; step number and learning rate
    go on."""
