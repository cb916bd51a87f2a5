"""Implements YaRN: rotary embeddings for sequences longer than in training (arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gsa_kernels.checks import check_at_least


@dataclass(frozen=True)
class YarnScaling:
    """Scales the rotation rates of channels. Fields have the names of transformers' `rope_parameters`.

    The scaling of a channel depends on how many turns it makes within the original length. With at least `beta_fast`
    turns, the channel keeps its rate. With fewer than `beta_slow` turns, its rate is divided by `factor`. In between,
    its rate is reduced by less than `factor`.
    """

    factor: float
    """New length over the original one; at least 1."""
    original_max_position_embeddings: int
    """Tokens of a sequence before the extension."""
    beta_fast: float = 32.0
    """Smallest number of turns within the original length with which a channel keeps its rate."""
    beta_slow: float = 1.0
    """A channel with fewer turns within the original length is slowed down by the whole factor."""
    attention_factor: float | None = None
    """Factor of cosines and sines, which therefore scales the attention logits twice. Default: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(
                f"factor is {self.factor}; pass at least 1, the new length over the original one"
            )
        check_at_least("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; pass beta_fast > beta_slow > 0"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor is {self.attention_factor}; pass a positive number, or None")

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def scaled(self, rates: torch.Tensor, base: float) -> torch.Tensor:
        """Convert the rotation angles per token, [channels / 2], to YaRN's angles.

        Args:
            rates: base ** (-2 i / channels) for i = 0, 1, ...
            base: above 1
        """
        channels = 2 * len(rates)

        def channel_that_turns(times: float) -> float:
            wavelength = self.original_max_position_embeddings / times
            return channels * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(channel_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(channel_that_turns(self.beta_slow)), channels - 1)
        place = torch.arange(len(rates), dtype=rates.dtype, device=rates.device)
        # transformers uses 0.001 if both limits are the same channel.
        slowed = ((place - first) / (last - first if last != first else 0.001)).clamp(0, 1)
        return rates / self.factor * slowed + rates * (1 - slowed)
