"""Selects groups of p neighbouring keys (`Geometry.indexer_pool`) by the kernels that select single keys.

A query chooses among the groups before its own group. The queries t = p (i + 1) + j with one remainder j therefore are
the rows i of an ordinary causal problem. Row i chooses among the groups up to group i. Its first group is the group of
its document's first key. Each sequence becomes p sequences, one for each remainder. The queries of the first group
choose nothing and have no row. If L is no multiple of p, the last rows of some remainders are zeros, and their
results are left out. Selection takes 1 / p of the work for single keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from gsa_kernels import limits
from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.format import union_density
from gsa_kernels.key_lists.triton_groups import lists_of_groups
from gsa_kernels.selection.budget import adaptive_budget
from gsa_kernels.selection.op import select_keys
from gsa_kernels.selection.triton_group_keys import packed_keys_of_groups
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection


@torch.no_grad()
def select_groups(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    kernel: limits.Kernel,
) -> Selection:
    """S_t: the keys of the k_t // p groups of highest score, ties to the lower one, the query's own group up to it, and
    its local window.

    Arguments and result as in `api.select`. Making key lists synchronises the host with the device.
    """
    rows, num_keys = rows_of_groups(geometry, indexer.queries.shape[1]), indexer.keys.shape[1]
    chosen = select_keys(
        rows.indexer(indexer),
        rule_of_groups(rule, rows.pool),
        variance_ema,
        rows.geometry(geometry),
        candidates_from=limits.CANDIDATES_FROM if num_keys > limits.PACKED_MASK_MAX_TOKENS else None,
    )
    assert chosen.packed_mask is not None
    words = limits.ceil_div(limits.ceil_div(num_keys, rows.pool), 32)
    group_mask = rows.by_query(chosen.packed_mask, 0)
    if group_mask.shape[-1] < words:  # room for the last group, which nobody chose
        group_mask = torch.nn.functional.pad(group_mask, (0, words - group_mask.shape[-1]))
    group_mask = group_mask.contiguous()
    variance = rows.by_query(chosen.variance, 0.0)
    del chosen  # its memory is free while the lists are made
    visible = torch.arange(geometry.query_start + 1, num_keys + 1, device=variance.device)[None]
    if geometry.document_starts is not None:
        visible = visible - geometry.document_starts
    budget = adaptive_budget(variance, variance_ema, visible, **asdict(rule)).to(torch.int32)
    density, kernel = None, kernel if num_keys <= limits.PACKED_MASK_MAX_TOKENS else "gathered"
    with launching_on(group_mask, "the indexer"):
        if kernel == "gathered" or (kernel == "auto" and num_keys >= limits.MEASURED_FROM_TOKENS):
            lists, group_lists = lists_of_groups(group_mask, geometry)
            density = union_density(lists)
            if kernel == "gathered" or density < limits.GATHERED_BELOW_DENSITY:
                return Selection(None, lists, budget, variance, density, group_lists=group_lists)
        packed_mask = packed_keys_of_groups(group_mask, geometry)
    return Selection(packed_mask, None, budget, variance, density, group_mask=group_mask)


@dataclass(frozen=True)
class GroupRows:
    """The p causal problems of each sequence. Row i of remainder j is query `skipped` + p i + j."""

    pool: int
    length: int
    """L"""
    skipped: int
    """Queries of the sequence's first group."""
    start: int
    """Position of row 0 among the groups."""

    @property
    def count(self) -> int:
        """Rows of a remainder."""
        return limits.ceil_div(self.length - self.skipped, self.pool)

    def by_row(self, x: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
        """[B, L, ...] of queries -> [B p, rows, ...]. Differentiable."""
        missing = self.skipped + self.count * self.pool - self.length
        x = torch.nn.functional.pad(x[:, self.skipped :], (*(0, 0) * (x.ndim - 2), 0, missing), value=padding)
        return x.unflatten(1, (self.count, self.pool)).transpose(1, 2).flatten(0, 1)

    def by_query(self, x: torch.Tensor, of_first_group: float) -> torch.Tensor:
        """The inverse: [B p, rows, ...] -> [B, L, ...]."""
        x = x.unflatten(0, (-1, self.pool)).transpose(1, 2).flatten(1, 2)
        padding = (*(0, 0) * (x.ndim - 2), self.skipped, 0)
        return torch.nn.functional.pad(x[:, : self.length - self.skipped], padding, value=of_first_group)

    def indexer(self, indexer: Indexer) -> Indexer:
        """Queries [B p, rows, HI, DI], keys [B p, groups, DI]. Differentiable."""
        keys = indexer.keys[:, : (self.start + self.count) * self.pool : self.pool]
        return replace(
            indexer,
            queries=self.by_row(indexer.queries),
            head_weight_logits=self.by_row(indexer.head_weight_logits),
            keys=keys[:, None].expand(-1, self.pool, -1, -1).flatten(0, 1),
        )

    def geometry(self, geometry: Geometry) -> Geometry:
        """Return the geometry of the rows and groups. Rows whose document begins in their own group have no group."""
        starts = geometry.document_starts
        if starts is None:
            return Geometry(query_start=self.start)
        of_rows = self.by_row(starts // self.pool, self.start + self.count)  # ascending, with rows of zeros
        return Geometry(of_rows.contiguous(), self.start)


def rows_of_groups(geometry: Geometry, length: int) -> GroupRows:
    """Raises ValueError for what the kernels do not have."""
    pool, remedy = geometry.indexer_pool, "or use implementation='reference'"
    if pool not in limits.KEY_POOLS:
        raise ValueError(f"indexer_pool is {pool}; pass one of {limits.KEY_POOLS}, {remedy}")
    skipped = pool if geometry.query_start == 0 else 0
    if length <= skipped:
        raise ValueError(
            f"the sequence has {length} tokens with indexer_pool {pool}; pass more than one group, {remedy}"
        )
    return GroupRows(pool, length, skipped, (geometry.query_start + skipped) // pool - 1)


def rule_of_groups(rule: BudgetRule, pool: int) -> BudgetRule:
    """k_t // p as a rule of its own. Exact: p is a power of two, so that k_base / p times a number is rounded like
    k_base times it, and floor(floor(x) / p) = floor(x / p)."""
    if rule.k_base % pool or rule.k_min < pool or rule.dense_below > 0:
        raise ValueError(
            f"rule has k_base {rule.k_base}, k_min {rule.k_min} and dense_below {rule.dense_below} with indexer_pool "
            f"{pool}; pass a multiple of {pool}, {pool} or more, and 0, or use implementation='reference'"
        )
    return replace(rule, k_base=rule.k_base // pool, k_min=rule.k_min // pool, k_max=rule.k_max // pool)
