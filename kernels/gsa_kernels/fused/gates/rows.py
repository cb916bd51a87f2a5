"""Logits of G1 as they stand in the output of the gates' projection, and their gradient there.

Per key-value head the projection has the row of G2, then G1's rows for its query heads. G1's are a view [..., 1:, :],
which attention reads. It writes their gradient into memory with room for G2's gradient, which the backward pass of G2
fills in: no copy makes the gradient of the whole projection.
"""

from typing import Any

import torch


def grouped(logits: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    """[B, L, H, D] or [B, L, Hkv, H / Hkv, D] -> the latter, a view."""
    if logits is None or logits.ndim == 5:
        return logits
    return logits.unflatten(2, (kv_heads, -1))


def empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of `logits` [B, L, Hkv, G, D], with room for G2 where these are rows of a projection."""
    batch, length, kv_heads, group, size = logits.shape
    width = kv_heads * (1 + group) * size
    if logits.stride() != (width, batch * width, (1 + group) * size, size, 1):
        return torch.empty_like(logits)
    projection = logits.new_empty(length, batch, kv_heads, 1 + group, size)
    gradient = projection[..., 1:, :].transpose(0, 1)
    holder: Any = gradient
    holder.projection = projection
    return gradient


def take_projection(gradient: torch.Tensor) -> torch.Tensor | None:
    """The memory [L, B, Hkv, 1 + G, D] of a gradient from `empty_gradient`, with room before the rows of G1.

    It is given once, and None for every other gradient, also for a sum of several: autograd makes that in memory of
    its own.
    """
    projection: torch.Tensor | None = vars(gradient).pop("projection", None)
    return projection
