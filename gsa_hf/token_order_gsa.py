"""Number the tokens of a sequence, which padding may interrupt. Letters in shapes are as in indexer_gsa.py."""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache


class TokenOrder(NamedTuple):
    """Numbers the tokens of each sequence from 0. Padding may be anywhere between tokens."""

    slots: torch.Tensor
    """int64 [B, Lk], the slot of the token with each number; the slots of padding come last"""
    numbers: torch.Tensor
    """int64 [B, Lk], the number of each slot's token; padding has the number of the token before it"""
    real: torch.Tensor
    """bool [B, Lk], whether a slot holds a token instead of padding"""

    def slots_of(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.slots.gather(1, numbers.clamp(min=0))


def token_order(visible: torch.Tensor, slots: torch.Tensor) -> TokenOrder:
    """
    Args:
        visible: bool [B, L, Lk], the keys that each query may see
        slots: int64 [L], the slots of this forward pass's tokens
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
    """Return the numbers of the tokens x [B, L, d] of this forward pass: int64 [B or 1, L].

    Args:
        visible: bool [B, 1, L, Lk], the keys that each query may see; or None
        padding: [B, slots], 0 at padding; read only if `visible` is None, and ignored if it has another shape
        layer_idx: a layer whose cache does not have these tokens yet
    """
    length = x.shape[1]
    slots = torch.arange(length, device=x.device) + (0 if cache is None else cache.get_seq_length(layer_idx))
    if visible is not None:
        return token_order(visible[:, 0], slots).numbers[:, slots]
    if isinstance(padding, torch.Tensor) and padding.ndim == 2:
        return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return slots[None]
