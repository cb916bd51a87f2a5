"""Number the tokens of a sequence, which padding may interrupt. Letters in shapes are as in indexer_gsa.py."""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache


class TokenOrder(NamedTuple):
    """Numbers the tokens of each sequence from 0. Padding may be anywhere between tokens."""

    slots: torch.Tensor
    """int64 [B, Lk], of each number; padding comes last"""
    numbers: torch.Tensor
    """int64 [B, Lk], of each slot; padding has the number of the token in front of it"""
    real: torch.Tensor
    """bool [B, Lk], no padding"""

    def slots_of(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.slots.gather(1, numbers.clamp(min=0))


def token_order(visible: torch.Tensor, slots: torch.Tensor) -> TokenOrder:
    """
    Args:
        visible: bool [B, L, Lk], the keys that each query may see
        slots: int64 [L], of the tokens of this forward pass
    """
    # With a cache a row is one document, whose last token is not padding. Otherwise padding does not see itself.
    whole = visible.shape[-1] == len(slots)
    real = visible.diagonal(dim1=1, dim2=2) if whole else visible[:, -1]
    return TokenOrder((~real).sort(dim=-1, stable=True).indices, real.cumsum(-1) - 1, real)


def token_numbers(
    x: torch.Tensor,
    visible: torch.Tensor | None,
    padding: torch.Tensor | None,
    cache: Cache | None,
    layer_idx: int = 0,
) -> torch.Tensor:
    """Returns the numbers of the tokens x [B, L, d] of this forward pass: int64 [B or 1, L].

    Args:
        visible: bool [B, 1, L, Lk], the keys that each query may see; or None
        padding: without `visible`, [B, slots], 0 where there is padding; other masks count as none
        layer_idx: a layer that has not seen these tokens yet
    """
    length = x.shape[1]
    slots = torch.arange(length, device=x.device) + (0 if cache is None else cache.get_seq_length(layer_idx))
    if visible is not None:
        return token_order(visible[:, 0], slots).numbers[:, slots]
    if isinstance(padding, torch.Tensor) and padding.ndim == 2:
        return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return slots[None]
