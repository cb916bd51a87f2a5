"""`gsa.*`: gates, indexer and selection of Gated Sparse Attention, and the kernels that run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Union


@dataclass(frozen=True)
class GSAConfig:
    attention: Literal["dense", "sparse"] = "sparse"
    """`dense` builds no indexer (the baselines standard and gated-only); `sparse` builds one."""
    value_gate: bool = True
    """G2: V * sigmoid(h W + b) (eq. 9)."""
    output_gate: bool = True
    """G1: O * sigmoid(h W + b), elementwise and head-specific (eq. 10)."""
    gate_bias_init: float = 0.0
    """Initial bias of both gates; 0 opens them to 0.5 (section 3.5 of the paper)."""
    indexer_heads: int = 4
    """Heads H_I of the lightning indexer."""
    indexer_dim: int = 64
    """Head size d_I of the indexer."""
    indexer_activation: Literal["sigmoid", "relu"] = "sigmoid"
    """`sigmoid` = GSA (eq. 7); `relu` with unbounded weights = DSA."""
    indexer_rope: bool = False
    """Rotary embedding on the indexer's queries and key, as DeepSeek's indexer has."""
    indexer_temperature: Union[float, str] = 1.0  # noqa: UP007 - OmegaConf reads typing.Union
    """beta in softmax(beta * I) of the indexer loss: a number, or `learned` (starts at 1)."""
    indexer_loss_row_fraction: float = 1.0
    """Share of the queries, 1 / n, from which training estimates the indexer loss without bias: every n-th run of 128,
    begun anew per micro-batch and layer. 1 = the paper, below it is cheaper and noisier. Validation uses all."""
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    """Budget rule (eq. 8): `inverse` k_base * ema / var, `direct` k_base * var / ema, `off` k_base."""
    k_base: int = 2048
    """Keys per query before adaptation."""
    k_min: int = 256
    """Smallest budget k_t."""
    k_max: int = 4096
    """Largest budget k_t."""
    variance_ema_decay: float = 0.99
    """Decay per optimizer step of the moving average of the score variance."""
    local_window: int = 0
    """The last `local_window` keys are always selected, beside the budget; 0 = the paper."""
    selection_block: int = 1
    """Aligned blocks of this many queries share the selection of their first query; 1 = the paper."""
    selection_reuse: int = 1
    """Layers in groups of this many share the selection of the group's first layer; 1 = the paper."""
    attention_impl: Literal["auto", "triton", "reference"] = "auto"
    """`triton`: fused kernels (GPU). `reference`: plain torch with L x L tensors. `auto`: triton on a GPU where its
    kernels cover the config, else reference; the run says at its start which it is."""
    attention_kernel: Literal["auto", "masked", "gathered"] = "auto"
    """Of the fused kernels for selections: `masked` visits all tiles of keys under a mask of bits, `gathered` fetches
    the keys that each 32 queries selected. `auto`: masked below 16384 tokens, from there what the selection's measured
    density favours, gathered above 32768 tokens and for shared selections."""
    dense_attention: Literal["auto", "cudnn", "flash_sdpa", "flash_attn", "triton"] = "auto"
    """Beside the fused kernels, what runs dense passes from which no indexer learns: our kernel, torch's cuDNN or
    FlashAttention-2 kernels, or the package flash-attn. Only `triton` stops at documents; not all of them repeat bit
    for bit. `auto` is triton."""
