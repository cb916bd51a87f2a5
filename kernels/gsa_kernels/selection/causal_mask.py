"""Computes the causal keys of a query in one document: the keys at or before it."""

import torch

from gsa_kernels.checks import check_at_least, check_shape


def causal_mask(num_keys: int, *, query_positions: torch.Tensor | None = None) -> torch.Tensor:
    """Return causal[0, r, s] = (s <= t_r), bool [1, R, Lk].

    Args:
        num_keys: Lk, the keys of the sequence, at positions 0 .. Lk - 1.
        query_positions: int64 [R], the position t_r of each row; all positions if None.
    """
    check_at_least("num_keys", num_keys, 1)
    key_positions = torch.arange(num_keys, device=None if query_positions is None else query_positions.device)
    if query_positions is None:
        query_positions = key_positions
    check_shape("query_positions", query_positions, "[R]", (None,))
    return (key_positions[None, :] <= query_positions[:, None])[None]
