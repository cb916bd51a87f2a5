"""Logits of G1 as they stand in the output of the gates' projection, and their gradient there.

The projection has per key-value head the row of G2, then those of G1 for its query heads. G1's are a view [..., 1:, :],
which attention reads. It puts their gradient into memory that has room for G2's: whoever calculates that one fills the
room, and the gradient of the whole projection is there without a copy.
"""

from typing import Any

import torch


def grouped(logits: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    """[B, L, H, D] or [B, L, Hkv, H / Hkv, D] -> the latter, a view."""
    if logits is None or logits.ndim == 5:
        return logits
    return logits.unflatten(2, (kv_heads, -1))


def empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of `logits` [B, L, Hkv, G, D], in their order and with the same gaps between heads."""
    batch, length, kv_heads, group, size = logits.shape
    spare = logits.stride(2) // size - group  # rows of G2 per key-value head
    in_rows = logits.stride(3) == size and logits.stride(2) % size == 0
    if not in_rows or spare < 1:
        return torch.empty_like(logits)
    length_first = logits.stride(1) >= logits.stride(0)
    outer = (length, batch) if length_first else (batch, length)
    projection = logits.new_empty(*outer, kv_heads, spare + group, size)
    gradient = (projection.transpose(0, 1) if length_first else projection)[..., spare:, :]
    holder: Any = gradient
    holder.projection = projection
    return gradient


def projection_of(gradient: torch.Tensor, rows: int) -> torch.Tensor | None:
    """The memory [L, B, Hkv, rows, D] of a gradient from `empty_gradient`, which has room before the rows of G1.

    None for every other gradient, also for a sum of several: autograd makes that in memory of its own.
    """
    projection: torch.Tensor | None = getattr(gradient, "projection", None)
    if projection is None:
        return None
    batch, length, kv_heads, _, size = gradient.shape
    return projection if projection.shape == (length, batch, kv_heads, rows, size) else None
