"""Finds the logits of the output gate G1 in the gates' projection, and allocates their gradient.

For each key-value head, the gates' projection has one row for the value gate G2, followed by one row of G1 for each
query head. Attention reads the rows of G1 as a view [..., 1:, :]. In the backward pass, attention writes the gradient
of G1 into the same view of a buffer that has the shape of the projection. The backward pass of G2 then fills the other
rows, so the buffer becomes the gradient of the whole projection.
"""

from typing import Any

import torch


def grouped(logits: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    """View [B, L, H, D] or [B, L, Hkv, H / Hkv, D] as [B, L, Hkv, H / Hkv, D]."""
    if logits is None or logits.ndim == 5:
        return logits
    return logits.unflatten(2, (kv_heads, -1))


def empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Allocate the gradient of G1's `logits` [B, L, Hkv, G, D], where G is the number of query heads per key-value
    head.

    If `logits` is a view of the gates' projection, the result is a view of a buffer that also has room for the rows of
    G2.
    """
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
    """Return the buffer [L, B, Hkv, 1 + G, D] that `empty_gradient` allocated for a gradient and the rows of G2.

    Only the first call for a gradient returns its buffer. Later calls return None. The function also returns None if
    autograd allocated the gradient, for example as the sum of several gradients.
    """
    projection: torch.Tensor | None = vars(gradient).pop("projection", None)
    return projection
