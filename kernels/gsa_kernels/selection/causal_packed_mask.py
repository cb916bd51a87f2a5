"""Computes `causal_mask` as a packed mask for some queries."""

import torch

from gsa_kernels.packed_mask import int32_words


def causal_packed_mask(
    positions: torch.Tensor, num_keys: int, document_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Set the bits of the keys from the start of a query's document to the query.

    Args:
        positions: int64 [R], of the queries
        num_keys: Lk
        document_starts: int [B, R], first position of each query's document; 0 if None

    Returns:
        int32 [B, R, ceil(Lk / 32)], or [1, R, ...] without `document_starts`: bit s % 32 of word s // 32 says that key
        s is causal for the query
    """
    starts = torch.zeros_like(positions[None]) if document_starts is None else document_starts
    return packed_mask_of_ranges(starts, positions[None] + 1, num_keys)


def packed_mask_of_ranges(starts: torch.Tensor, ends: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return a packed mask, int32 [..., ceil(Lk / 32)]. The bit of a key is 1 if starts <= key < ends. `starts` and
    `ends` are int tensors of equal shape [...]."""
    return int32_words(_below(torch.maximum(starts, ends), num_keys) - _below(starts, num_keys))


def _below(ends: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return int64 words with the bits of the keys before each end."""
    first_keys = torch.arange(0, num_keys, 32, device=ends.device)
    bits = (ends.long()[..., None] - first_keys).clamp(0, 32)
    return (1 << bits) - 1
