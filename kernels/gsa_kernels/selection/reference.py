"""Defines which keys each query attends to: the exact top-k and the local window."""

import torch

from gsa_kernels.checks import (
    check_at_least,
    check_mask,
    check_row_counts,
    check_shape,
    compute_dtype,
)


def select_top_k(scores: torch.Tensor, causal: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Select S_t: the `budget` causal keys with the highest scores. Ties go to the lower index.

    Args:
        scores: [B, R, Lk], finite on causal keys
        causal: bool [B or 1, R, Lk]
        budget: int [B or 1, R]; a row whose budget exceeds its causal keys selects all of them

    Returns:
        bool [B, R, Lk], False on every other key.
    """
    check_shape("scores", scores, "[B, R, Lk]", (None, None, None))
    batch, rows, num_keys = scores.shape
    check_mask("causal", causal, batch, rows, num_keys)
    check_row_counts("budget", budget, batch, rows)
    compute_dtype(scores=scores)
    # Adding 0 turns -0.0 into 0.0, so that the two tie even in a sort that compares bits.
    ranked = torch.where(causal, scores.detach() + 0.0, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    within_budget = torch.arange(num_keys, device=scores.device) < budget[..., None]
    selected = torch.zeros_like(ranked, dtype=torch.bool)
    selected.scatter_(-1, order, within_budget.expand(batch, rows, num_keys))
    return selected & causal


def local_window_mask(num_keys: int, window: int, *, query_positions: torch.Tensor) -> torch.Tensor:
    """Return near[r, s] = (s <= t_r) and (t_r - s < window). The causal mask handles documents.

    Args:
        num_keys: Lk
        window: keys per query, including its own; 0 gives no keys
        query_positions: int64 [R], the position t_r of each row

    Returns:
        bool [R, Lk]
    """
    check_at_least("num_keys", num_keys, 1)
    check_at_least("window", window, 0)
    check_shape("query_positions", query_positions, "[R]", (None,))
    distance = query_positions[:, None] - torch.arange(num_keys, device=query_positions.device)
    return (distance >= 0) & (distance < window)
