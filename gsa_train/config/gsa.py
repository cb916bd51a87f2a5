"""`gsa.*`: gates, indexer and selection of Gated Sparse Attention, and the kernels that run them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Union

from gsa_kernels import limits
from gsa_train.config.parallel import chunk_in_words, undivided_chunk

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class GSAConfig:
    attention: Literal["dense", "sparse"] = "sparse"
    """`dense` builds no indexer (the baselines standard and gated-only); `sparse` builds one."""
    value_gate: bool = True
    """G2: V * sigmoid(h W + b), before attention (eq. 9)."""
    output_gate: bool = True
    """G1: O * sigmoid(h W + b), after attention, elementwise and head-specific (eq. 10)."""
    key_gate: bool = False
    """G3: K * sigmoid(h W + b), before K's rotary embedding. Positions and forms of gates follow arXiv 2505.06708."""
    query_gate: bool = False
    """G4: Q * sigmoid(h W + b), before Q's rotary embedding."""
    projection_gate: bool = False
    """G5: multiply the output of W_O by sigmoid(h W + b), before the residual connection."""
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    """`elementwise`: each channel of a head has a gate. `headwise`: all channels of a head share one gate."""
    gate_sharing: Literal["head_specific", "head_shared"] = "head_specific"
    """`head_specific`: each head has its own gates. `head_shared`: all heads share the gates."""
    gate_form: Literal["multiplicative", "additive"] = "multiplicative"
    """How a gate g acts on y: y * g, or y + g."""
    gate_activation: Literal["sigmoid", "silu", "ns_sigmoid", "identity"] = "sigmoid"
    """Function that computes a gate from its logits h W + b. `ns_sigmoid`: 0.5 + 0.5 sigmoid, which cannot close."""
    gate_input: Literal["query_dependent", "input_independent"] = "query_dependent"
    """`input_independent`: the logits are b alone and are the same for all tokens."""
    gate_bias_init: float = 0.0
    """Initial bias b of all gates. With 0 their mean value is 0.5 (section 3.5 of the paper)."""
    output_transform: Literal["none", "rms_norm", "silu"] = "none"
    """Replaces the output gate. `rms_norm`: RMSNorm of each head's attention output with one weight for all heads.
    `silu`: SiLU of the attention output."""
    indexer_heads: int = 4
    """Number of heads H_I of the lightning indexer."""
    indexer_dim: int = 64
    """Head size d_I of the indexer."""
    indexer_activation: Literal["sigmoid", "relu", "plain", "qsa"] = "sigmoid"
    """Activation of the scores by which the indexer selects keys. `sigmoid`: as in the paper (eq. 7). `relu`: as in
    DeepSeek Sparse Attention, with unbounded head weights. `plain`: `sigmoid` without head weights. `qsa`: `relu`
    without head weights."""
    indexer_norm: bool = False
    """Apply RMSNorm to each head's query and to the key of the indexer, before their rotary embedding."""
    indexer_rope: bool = False
    """Apply a rotary embedding to the indexer's queries and key, as in DeepSeek's indexer."""
    indexer_temperature: Union[float, str] = 1.0  # noqa: UP007 - OmegaConf reads typing.Union
    """Factor beta on the indexer's scores I in softmax(beta * I) of the indexer loss: a number, or `learned`, which
    starts at 1. The paper has 1."""
    indexer_loss_row_fraction: float = 1.0
    """Share 1 / n of the queries that the indexer loss uses in training: every n-th group of 128 queries (32 with key
    lists). A random offset moves with each micro-batch, so that n micro-batches use each query position once. Below 1
    the loss is cheaper and noisier, but unbiased. Validation uses all queries. The paper has 1."""
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    """Formula for the number of keys that a query selects (eq. 8). var is the variance of the query's scores, and ema
    its moving average. `inverse`: k_base * ema / var. `direct`: k_base * var / ema. `off`: k_base."""
    k_base: int = 2048
    """Keys per query before adaptation."""
    k_min: int = 256
    """Smallest budget k_t, in keys per query."""
    k_max: int = 4096
    """Largest budget k_t, in keys per query."""
    dense_below: int = 0
    """A query with fewer causal keys than this selects all of them, whatever its budget. 0: none."""
    variance_ema_decay: float = 0.99
    """Decay per optimizer step of the moving average of the score variance."""
    local_window: int = 0
    """Number of latest keys that are always selected, in addition to the budget. The paper has 0."""
    selection_reuse: int = 1
    """Number of neighbouring layers that share the selection of the first of them. The paper has 1."""
    attention_impl: Literal["auto", "triton", "reference"] = "auto"
    """`triton`: fused kernels (GPU). `reference`: plain torch with L x L tensors. `auto`: `triton` on a GPU if its
    kernels support the config, otherwise `reference`. The start of the run logs the choice."""
    attention_kernel: Literal["auto", "masked", "gathered"] = "auto"
    """Fused kernel for sparse attention. `masked` computes every tile of keys under a packed mask (one bit per key).
    `gathered` computes only keys that any of 32 neighbouring queries selects, from key lists. `auto`: `gathered` if a
    query has 8192 or more keys to select from, these are at least 8 times `k_base`, and `train.cuda_graphs` is off, and
    always above 32768 tokens; otherwise `masked`."""
    dense_attention: Literal["auto", "cudnn", "flash_sdpa", "flash_attn", "triton"] = "auto"
    """Kernel for dense attention without an indexer loss, if `attention_impl` chooses `triton`: our kernel (`triton`),
    torch's cuDNN or FlashAttention-2 kernels, or the package flash-attn. Only `triton` stops at document borders. The
    others may not be bit-reproducible. `auto` is `triton`."""

    def kernel_for(self, num_keys: int, avoid_lists: bool) -> Literal["masked", "gathered"]:
        """Return the fused attention kernel for queries with up to `num_keys` causal keys.

        Args:
            avoid_lists: `auto` takes key lists (`gathered`) only if a packed mask would be too large
        """
        if self.attention_kernel != "auto":
            return self.attention_kernel
        if avoid_lists and num_keys <= limits.PACKED_MASK_MAX_TOKENS:
            return "masked"
        return "gathered" if limits.takes_key_lists("auto", num_keys, self.k_base) else "masked"

    @property
    def most_selected_keys(self) -> int:
        """Return the largest number of keys that a query selects if it leaves keys out."""
        return self.k_max + self.local_window


@dataclass(frozen=True)
class Scores:
    activation: Literal["sigmoid", "relu"]
    """Activation of the products of queries and keys. `sigmoid` is also applied to the head weights."""
    head_weight_logit: float | None = None
    """Constant logit of all head weights if they are not a projection, else None."""

    @property
    def learns_head_weights(self) -> bool:
        return self.head_weight_logit is None

    @property
    def has_score_bias(self) -> bool:
        return self.activation == "sigmoid"

    @property
    def has_head_weight_bias(self) -> bool:
        return self.activation == "sigmoid" and self.learns_head_weights


LOGIT_OF_ONE = 64.0
"""sigmoid(64) is exactly 1 in fp32 and fp64, and bf16 represents 64 exactly."""

SCORES = {
    "sigmoid": Scores("sigmoid"),
    "relu": Scores("relu"),
    "plain": Scores("sigmoid", LOGIT_OF_ONE),
    "qsa": Scores("relu", 1.0),
}
"""By `gsa.indexer_activation`."""


def check_selection(config: Config) -> Iterator[str]:
    gsa, order = config.gsa, "need k_min <= k_base <= k_max"
    if gsa.k_min > gsa.k_base:
        yield config.problem("gsa.k_min", f"above gsa.k_base = {gsa.k_base}", order)
    if gsa.k_max < gsa.k_base:
        yield config.problem("gsa.k_max", f"below gsa.k_base = {gsa.k_base}", order)
    share = gsa.indexer_loss_row_fraction
    # Exact to one percent, as in `gsa_kernels.sampling`: 0.3333 is a third.
    if not 0 < share <= 1 or math.isinf(1 / share) or abs(share * round(1 / share) - 1) > 0.01:
        remedy = "give 1, which takes every query, 0.5, 0.3333, 0.25, ..."
        yield config.problem("gsa.indexer_loss_row_fraction", "not 1 / n for a whole n", remedy)
    beta = gsa.indexer_temperature
    if beta != "learned" and (isinstance(beta, str) or beta <= 0):
        yield config.problem("gsa.indexer_temperature", "neither above 0 nor learned", "1.0 is the paper's")
    if undivided := undivided_chunk(config, gsa.selection_reuse):
        wrong = (
            f"does not divide the {undivided} layers of {chunk_in_words(config)}, and a group may not cross from one "
            "to the next"
        )
        yield config.problem("gsa.selection_reuse", wrong, f"choose a divisor of {undivided}")
