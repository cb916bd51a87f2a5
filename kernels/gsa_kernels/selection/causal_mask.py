"""Computes the causal keys of a query: the keys at or before it, in its own document."""

import torch

from gsa_kernels.checks import check_at_least, check_shape


def causal_mask(
    num_keys: int,
    *,
    query_positions: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal[b, r, s] = (s <= t_r) and document(t_r) == document(s).

    Args:
        num_keys: Lk, the keys of the sequence, at positions 0 .. Lk - 1.
        query_positions: int64 [R], the position t_r of each row; all positions if None.
        document_ids: int [B, Lk], one id per token of a packed sequence; one document if None.

    Returns:
        bool [B, R, Lk], or [1, R, Lk] without `document_ids`.
    """
    check_at_least("num_keys", num_keys, 1)
    given = query_positions if query_positions is not None else document_ids
    device = given.device if given is not None else "cpu"
    key_positions = torch.arange(num_keys, device=device)
    if query_positions is None:
        query_positions = key_positions
    check_shape("query_positions", query_positions, "[R]", (None,))
    query_positions = query_positions.to(device=device, dtype=torch.int64)

    causal = (key_positions[None, :] <= query_positions[:, None])[None]
    if document_ids is None:
        return causal
    check_shape("document_ids", document_ids, "[B, Lk]", (None, num_keys))
    document_ids = document_ids.to(device)
    query_documents = document_ids[:, query_positions]
    return causal & (query_documents[:, :, None] == document_ids[:, None, :])
