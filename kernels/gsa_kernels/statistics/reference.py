"""How alike the selections of neighbouring queries are: what sharing one selection could save."""

import torch

from gsa_kernels.checks import check_at_least, check_shape


def adjacent_overlap(selected: torch.Tensor) -> torch.Tensor:
    """Mean over t >= 1 of |S_t & S_{t-1}| / |S_t|; queries that select nothing are left out.

    Args:
        selected: bool [B, L, Lk]

    Returns:
        0-d fp32; 0 if no query has a predecessor.
    """
    _check_selected(selected)
    shared = (selected[:, 1:] & selected[:, :-1]).sum(-1)
    return _mean_ratio(shared, selected[:, 1:].sum(-1).float())


def union_ratio(selected: torch.Tensor, group: int = 32) -> torch.Tensor:
    """r(group): mean over aligned groups of queries of |union of S_t in the group| / mean |S_t|.

    1 means that the group agrees, `group` that its selections are disjoint. A short group at the end
    would read too low and is left out, unless it is the only one.

    Args:
        selected: bool [B, L, Lk]

    Returns:
        0-d fp32
    """
    _check_selected(selected)
    check_at_least("group", group, 1)
    length = selected.shape[1]
    group = min(group, length)
    groups = selected[:, : length - length % group].unflatten(1, (-1, group))
    union = groups.any(2).sum(-1)
    return _mean_ratio(union, groups.sum(-1).float().mean(-1))


def _check_selected(selected: torch.Tensor) -> None:
    check_shape("selected", selected, "[B, L, Lk]", (None, None, None))
    if selected.dtype != torch.bool:
        raise ValueError(f"selected has dtype {selected.dtype}; pass a bool mask")
    check_at_least("selected.shape[1]", selected.shape[1], 1)


def _mean_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Mean of numerator / denominator where the denominator is positive; 0 if it never is."""
    counted = denominator > 0
    ratio = torch.where(counted, numerator / denominator, 0)
    return ratio.sum() / counted.sum().clamp(min=1)
