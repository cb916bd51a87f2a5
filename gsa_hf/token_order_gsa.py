"""The order of a sequence's tokens, which padding may interrupt, and groups of neighbouring ones.

Letters in shapes are as in indexer_gsa.py.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache


class TokenOrder(NamedTuple):
    """The tokens of each sequence, numbered from 0: padding may be anywhere between them."""

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
    # With a cache a row is one document, whose last token is not padding; without, padding does not see itself.
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


class KeyGroups(NamedTuple):
    """Neighbouring keys that are scored and selected together; a group's values are stored at its first key."""

    size: int
    of_keys: torch.Tensor
    """int64 [B, Lk], slot of the first key of each key's group"""
    of_queries: torch.Tensor
    """int64 [B, L], of each query's own group"""
    of_starts: torch.Tensor
    """int64 [B, L], of the group in which the query's document begins"""
    counted: torch.Tensor
    """bool [B, Lk], keys of the document of their group's last key, which make the group's mean"""

    def mean(self, keys: torch.Tensor) -> torch.Tensor:
        """Returns the groups' means at their first keys, [B, Lk, DI], summed in fp32."""
        counted = self.counted[..., None]
        sums, sizes = (
            torch.zeros_like(each).scatter_add(1, self.of_keys[..., None].expand_as(each), each)
            for each in (torch.where(counted, keys.float(), 0), counted.float())
        )
        return (sums / sizes.clamp(min=1)).to(keys.dtype)

    def before_own(self) -> torch.Tensor:
        """Returns bool [B, L, Lk], the first key of each group of the query's document before the query's own."""
        slots = torch.arange(self.of_keys.shape[-1], device=self.of_keys.device)
        between = (slots >= self.of_starts[..., None]) & (slots < self.of_queries[..., None])
        return (self.of_keys == slots)[:, None] & between

    def keys_of(self, selected: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Returns all keys of the selected groups, and of the query's own group up to the query: bool [B, L, Lk]."""
        of_keys = self.of_keys[:, None]
        chosen = selected.gather(-1, of_keys.expand_as(selected))
        return (chosen | (of_keys == self.of_queries[..., None])) & visible


def key_groups(size: int, slots: torch.Tensor, visible: torch.Tensor, order: TokenOrder) -> KeyGroups:
    """
    Args:
        slots: int64 [L], of the tokens of this forward pass
        visible: bool [B, L, Lk], the keys that each query may see
    """
    numbers = order.numbers
    starts = numbers.gather(1, visible.int().argmax(-1))

    def first_of_group(number: torch.Tensor) -> torch.Tensor:
        return order.slots_of(number - number % size)

    counted = order.real
    if len(slots) == numbers.shape[1]:  # a cache holds one document
        last = (numbers - numbers % size + size - 1).minimum(numbers[:, -1:])
        counted = counted & (numbers >= starts.gather(1, order.slots_of(last)))
    of_keys, of_queries, of_starts = (first_of_group(each) for each in (numbers, numbers[:, slots], starts))
    return KeyGroups(size, of_keys, of_queries, of_starts, counted)
