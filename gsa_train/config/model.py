"""`model.*`: the sizes of the transformer."""

from __future__ import annotations

from dataclasses import dataclass


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
    rotary_percent: float = 1.0
    """Share of each head's channels, the first ones, that the rotary embedding turns; Qwen3-Next has 0.25."""
    qkv_bias: bool = False
    """Biases of the projections of Q, K and V, as Qwen2 has them; 0 at first."""
    qk_norm: bool = False
    """RMSNorm on each head's Q and K before the rotary embedding."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 num_layers)."""
    tie_embeddings: bool = False
    """Use the input embedding's weights in the output layer, too."""
