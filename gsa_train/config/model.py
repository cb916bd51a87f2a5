"""`model.*`: the sizes of the transformer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class RopeScalingConfig:
    """Has the fields of transformers' `rope_parameters`."""

    rope_type: Literal["default", "yarn"] = "default"
    """`default`: no scaling. `yarn`: YaRN (arXiv 2309.00071) extends a trained model to longer sequences. It slows
    down, by `factor`, channels of a head that rotate less than `beta_slow` times within the original length."""
    factor: float = 1.0
    """New length divided by the original length, 1 or more."""
    original_max_position_embeddings: int = 0
    """Tokens of a sequence before the extension. `yarn` needs it."""
    beta_fast: float = 32.0
    """Rotations within the original length above which a channel keeps its rate."""
    beta_slow: float = 1.0
    """Rotations within the original length below which a channel is slowed down by the whole factor."""
    attention_factor: float = 0.0
    """Factor on the rotary embedding of Q and K. 0 means 0.1 ln(factor) + 1. The indexer (`gsa.indexer_rope`) does not
    use it."""


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 4
    """Number of transformer layers."""
    hidden_size: int = 256
    """Width d of the residual stream."""
    num_heads: int = 4
    """Number of query heads n_h."""
    num_kv_heads: int = 2
    """Number of key-value heads n_kv. Each serves num_heads / num_kv_heads query heads."""
    head_dim: int = 64
    """Size d_k of one head."""
    ffn_hidden_size: int = 704
    """Inner width of the SwiGLU feed-forward layer."""
    vocab_size: int = 4096
    """Rows of the embedding, at least the number of the tokenizer's tokens."""
    rope_base: float = 10000.0
    """Base of the rotary embedding on Q and K."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Rotary embedding for longer sequences."""
    rotary_percent: float = 1.0
    """Share of each head's channels that the rotary embedding rotates: the first ones, rounded down to whole
    channels."""
    qkv_bias: bool = False
    """The projections of Q, K and V have biases, as in Qwen2. They start at 0."""
    qk_norm: bool = False
    """Apply RMSNorm to each head's Q and K before the rotary embedding."""
    sandwich_norm: bool = False
    """Also apply RMSNorm after attention and after the feed-forward layer, before the residual connections."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights. Output projections use init_std / sqrt(2 num_layers)."""
    tie_embeddings: bool = False
    """The output layer shares the weights of the input embedding."""

    @property
    def rotary_channels(self) -> int:
        """Return the channels of a head that the rotary embedding rotates, rounded as in megatron-core and
        transformers."""
        return int(self.head_dim * self.rotary_percent)


def check_rotary(config: Config) -> Iterator[str]:
    """Check `model.rotary_percent` and `model.rope_scaling`."""
    model = config.model
    field, share, size = "model.rotary_percent", model.rotary_percent, model.head_dim
    if share > 1:
        yield config.problem(field, "above 1", "give a share of the channels of a head, 1 for all")
    elif 0 < share < 1 < size and ((channels := model.rotary_channels) == 0 or channels % 2 != 0):
        wrong = f"turns {channels} of model.head_dim = {size} channels, and RoPE turns pairs"
        even = max(2, 2 * round(share * size / 2))
        yield config.problem(field, wrong, f"give {_share_of(even, size)}, which turns {even} channels")
    section, scaling = "model.rope_scaling", model.rope_scaling
    if scaling.rope_type == "default":
        wrong = f"without effect with {section}.rope_type = default"
        remedy = f"set {section}.rope_type=yarn, or leave it out"
        for each in dataclasses.fields(scaling):
            if getattr(scaling, each.name) != each.default:
                yield config.problem(f"{section}.{each.name}", wrong, remedy)
        return
    if scaling.original_max_position_embeddings == 0:
        wrong, remedy = "not the length that YaRN extends", "give the tokens of a sequence before it"
        yield config.problem(f"{section}.original_max_position_embeddings", wrong, remedy)
    if 0 < scaling.factor < 1:
        yield config.problem(f"{section}.factor", "below 1", "give the new length over the original one")
    if 0 < scaling.beta_fast <= scaling.beta_slow:
        wrong = f"not above {section}.beta_slow = {scaling.beta_slow:g}"
        yield config.problem(f"{section}.beta_fast", wrong, "32 and 1 are usual")
    if 0 < model.rope_base <= 1:
        yield config.problem("model.rope_base", "not above 1 with YaRN", "10000 is usual")


def _share_of(channels: int, size: int) -> float:
    """Returns the shortest decimal share for which `ModelConfig.rotary_channels` gives `channels`."""
    quotient = channels / size
    shortest = float(f"{quotient:.6g}")
    if int(size * shortest) == channels:
        return shortest
    return quotient if int(size * quotient) == channels else math.nextafter(quotient, 1.0)
