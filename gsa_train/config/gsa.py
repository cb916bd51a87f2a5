"""`gsa.*`: gates, indexer and selection of Gated Sparse Attention, and the kernels that run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Union


@dataclass(frozen=True)
class GSAConfig:
    attention: Literal["dense", "sparse"] = "sparse"
    """`dense` builds no indexer (the baselines standard and gated-only); `sparse` builds one."""
    value_gate: bool = True
    """G2: V * sigmoid(h W + b), before attention (eq. 9)."""
    output_gate: bool = True
    """G1: O * sigmoid(h W + b), after attention, elementwise and head-specific (eq. 10)."""
    key_gate: bool = False
    """G3: the same on K, before its rotary embedding. Positions and forms of gates are those of arXiv 2505.06708."""
    query_gate: bool = False
    """G4: the same on Q, before its rotary embedding."""
    projection_gate: bool = False
    """G5: the same on what W_O makes of attention's output, before the residual connection."""
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    """`elementwise`: a gate for each channel of a head. `headwise`: one for all channels of a head."""
    gate_sharing: Literal["head_specific", "head_shared"] = "head_specific"
    """`head_specific`: each head has gates of its own. `head_shared`: all heads have the same."""
    gate_form: Literal["multiplicative", "additive"] = "multiplicative"
    """What a gate g makes of y: y * g, or y + g."""
    gate_activation: Literal["sigmoid", "silu", "ns_sigmoid", "identity"] = "sigmoid"
    """What makes a gate of its logits h W + b. `ns_sigmoid`: 0.5 + 0.5 sigmoid, which cannot close."""
    gate_input: Literal["query_dependent", "input_independent"] = "query_dependent"
    """`input_independent`: the logits are b alone, the same for all tokens."""
    gate_bias_init: float = 0.0
    """Initial bias b of all gates; with 0 their mean opening is 0.5 (section 3.5 of the paper)."""
    output_transform: Literal["none", "rms_norm", "silu"] = "none"
    """In the place of G1, without a gate: RMSNorm of each head's attention output, one weight for all heads; or SiLU of
    it."""
    indexer_heads: int = 4
    """Number of heads H_I of the lightning indexer."""
    indexer_dim: int = 64
    """Head size d_I of the indexer."""
    indexer_activation: Literal["sigmoid", "relu", "plain", "qsa"] = "sigmoid"
    """Activation of the indexer's scores. `sigmoid`: GSA (eq. 7). `relu`, with unbounded head weights: DSA. `plain` is
    `sigmoid` without head weights, `qsa` is `relu` without."""
    indexer_norm: bool = False
    """RMSNorm on each head's query and on the key of the indexer, before their rotary embedding."""
    indexer_rope: bool = False
    """Rotary embedding on the indexer's queries and key, as DeepSeek's indexer has."""
    indexer_temperature: Union[float, str] = 1.0  # noqa: UP007 - OmegaConf reads typing.Union
    """beta in softmax(beta * I) of the indexer loss: a number, or `learned`, which starts at 1. 1 = the paper."""
    indexer_loss_row_fraction: float = 1.0
    """Share of the queries, 1 / n, on which the indexer loss is computed in training: every n-th stretch of 128
    queries, from an offset drawn for each micro-batch and layer. Over key lists a stretch is a list: 32 queries, or the
    `selection_block` that share one. Of a sequence (or a chunk of it, under context parallelism) of fewer than n
    stretches one is taken. The estimate has no bias. 1 = the paper; below 1 is cheaper and noisier. Validation uses all
    queries."""
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    """Budget of keys of a query (eq. 8), with var the variance of its scores and ema their moving average: `inverse`
    k_base * ema / var, `direct` k_base * var / ema, `off` k_base."""
    k_base: int = 2048
    """Keys per query before adaptation."""
    k_min: int = 256
    """Smallest budget k_t, in keys per query."""
    k_max: int = 4096
    """Largest budget k_t, in keys per query."""
    dense_below: int = 0
    """Queries that see fewer keys than this select all of them, whatever their budget: to them GSA is dense attention.
    0: none."""
    variance_ema_decay: float = 0.99
    """Decay per optimizer step of the moving average of the score variance."""
    local_window: int = 0
    """Number of latest keys that are always selected, beside the budget; 0 = the paper."""
    selection_block: int = 1
    """Queries in aligned blocks of this many share the selection of the first of them; 1 = the paper."""
    indexer_pool: int = 1
    """The indexer scores the mean key of each group of so many neighbours, aligned in their document, and groups are
    selected, within the same budget of keys; the query's own group is always read. The kernels take powers of two up to
    32, one document per sequence, no window. 1 = the paper."""
    selection_query: Literal["first", "previous_mean"] = "first"
    """What scores the keys for a block of `selection_block`: `first`, its first query; `previous_mean`, the mean of the
    indexer's queries and head weights over the block before it, as far as that is of the same document."""
    selection_reuse: int = 1
    """Layers in groups of this many share the selection of the first of them; 1 = the paper."""
    reuse_teacher: Literal["leader", "group"] = "leader"
    """Whose attention the indexer of a group of `selection_reuse` layers learns: `leader`, that of its own layer;
    `group`, in plain torch, the mean over the layers of the group."""
    attention_impl: Literal["auto", "triton", "reference"] = "auto"
    """`triton`: fused kernels (GPU). `reference`: plain torch with L x L tensors. `auto`: `triton` on a GPU where its
    kernels can do what the config asks, else `reference`. The start of the run logs the choice."""
    attention_kernel: Literal["auto", "masked", "gathered"] = "auto"
    """Which fused kernel attends to the selected keys. `masked`: every tile of keys, under a packed mask. `gathered`:
    only the keys that any of 32 neighbouring queries selected, from key lists. `auto`: gathered above 32768 tokens;
    masked below 16384, and from there on what the measured density of the selection favours; of shared selections
    gathered where their budget, `k_base` and `local_window`, is less than 0.42 of the sequence."""
    dense_attention: Literal["auto", "cudnn", "flash_sdpa", "flash_attn", "triton"] = "auto"
    """What runs dense attention where no indexer learns from it and the fused kernels are in use: our kernel
    (`triton`), torch's cuDNN or FlashAttention-2 kernels, or the package flash-attn. Only `triton` stops at the
    borders of documents; the others may not repeat bit for bit. `auto` is `triton`."""
