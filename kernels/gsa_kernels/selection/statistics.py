"""Measures how similar the selections of neighbouring queries are, which determines the length of key lists."""

import torch

from gsa_kernels.checks import check_at_least, check_shape


def adjacent_overlap(selected: torch.Tensor) -> torch.Tensor:
    """Return |S_t & S_{t-1}| / |S_t| for each query t >= 1, fp32 [B, L - 1]. S_t are the keys of query t. The result is
    0 where S_t is empty.

    Args:
        selected: bool [B, L, Lk]
    """
    _check_selected(selected)
    shared = (selected[:, 1:] & selected[:, :-1]).sum(-1)
    return shared / selected[:, 1:].sum(-1).clamp(min=1)


def union_ratio(selected: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Compute |union of S_t in the group| / mean |S_t| for each aligned group of queries: fp32 [B, L / group].

    The ratio is 1 if all queries of the group select the same keys, and `group` if their selections are disjoint. It is
    0 if all selections are empty.

    Args:
        selected: bool [B, L, Lk]
        group: divides L
    """
    _check_selected(selected)
    check_at_least("group", group, 1)
    if selected.shape[1] % group:
        raise ValueError(f"group is {group}; pass a divisor of the {selected.shape[1]} queries")
    groups = selected.unflatten(1, (-1, group))
    union, total = groups.any(2).sum(-1), groups.sum((-1, -2))
    return union * group / total.clamp(min=1)


def _check_selected(selected: torch.Tensor) -> None:
    check_shape("selected", selected, "[B, L, Lk]", (None, None, None))
    if selected.dtype != torch.bool:
        raise ValueError(f"selected has dtype {selected.dtype}; pass a bool mask")
    check_at_least("selected.shape[1]", selected.shape[1], 1)
