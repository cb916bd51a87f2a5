"""`model.*`: the sizes of the transformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeScalingConfig:
    """The fields of transformers' `rope_parameters`."""

    rope_type: Literal["default", "yarn"] = "default"
    """`default`: no scaling. `yarn`: YaRN (arXiv 2309.00071), for longer sequences than those of the training so far.
    The channels of a head that turn less than `beta_slow` times in the original length are slowed down by `factor`."""
    factor: float = 1.0
    """New length over the original one; 1 or more."""
    original_max_position_embeddings: int = 0
    """Tokens of a sequence before the extension; to be given with `yarn`."""
    beta_fast: float = 32.0
    """Turns within the original length from which on a channel keeps its rate."""
    beta_slow: float = 1.0
    """Turns within the original length below which a channel is slowed down by the whole factor."""
    attention_factor: float = 0.0
    """What the rotary embedding of Q and K is multiplied with; 0: 0.1 ln(factor) + 1. The indexer's, with
    `gsa.indexer_rope`, is scaled in its rates alone."""


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 4
    """Number of transformer layers."""
    hidden_size: int = 256
    """Width d of the residual stream."""
    num_heads: int = 4
    """Number of query heads n_h."""
    num_kv_heads: int = 2
    """Number of key-value heads n_kv; each serves num_heads / num_kv_heads query heads."""
    head_dim: int = 64
    """Size d_k of one head."""
    ffn_hidden_size: int = 704
    """Inner width of the SwiGLU feed-forward layer."""
    vocab_size: int = 4096
    """Rows of the embedding; at least the number of the tokenizer's tokens."""
    rope_base: float = 10000.0
    """Base of the rotary embedding on Q and K."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Rotary embedding for longer sequences."""
    rotary_percent: float = 1.0
    """Share of each head's channels, the first ones, that the rotary embedding turns, rounded down to whole channels;
    Qwen3-Next has 0.25."""
    qkv_bias: bool = False
    """Biases of the projections of Q, K and V, as Qwen2 has them; 0 at first."""
    qk_norm: bool = False
    """RMSNorm on each head's Q and K before the rotary embedding."""
    sandwich_norm: bool = False
    """RMSNorm behind attention and behind the feed-forward layer, too, before the residual connections."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 num_layers)."""
    tie_embeddings: bool = False
    """Use the input embedding's weights in the output layer, too."""

    @property
    def rotary_channels(self) -> int:
        """Of a head, that the rotary embedding turns: as megatron-core and transformers round them."""
        return int(self.head_dim * self.rotary_percent)
