"""Selection of groups of neighbouring keys (`Geometry.indexer_pool` p), by the kernels that select single keys.

A query chooses among the groups before its own. So the queries t = p (i + 1) + j with one remainder j are the rows i of
an ordinary causal problem: row i sees the groups 0 .. i. The p remainders of each sequence are p sequences of
C = L / p - 1 rows and C groups; no query chooses the last group, and the queries of the first group choose nothing.
Selection takes 1 / p of the work for single keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gsa_kernels import limits
from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.format import KeyLists, union_density
from gsa_kernels.key_lists.triton_build import CountedKeys, FilledLists, count_keys, fill_lists, join_lists
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
    """S_t: the keys of the k_t // p groups of highest score, ties to the lower one, and the query's own group up to it.

    Arguments and result as in `api.select`. Making key lists synchronises the host with the device.
    """
    pool, length = geometry.indexer_pool, indexer.queries.shape[1]
    check_groups(geometry, length)
    by_candidates = length > limits.PACKED_MASK_MAX_TOKENS
    chosen = select_keys(
        indexer_of_groups(indexer, pool),
        rule_of_groups(rule, pool),
        variance_ema,
        candidates_from=limits.CANDIDATES_FROM if by_candidates else None,
    )
    group_mask = chosen.packed_mask
    assert group_mask is not None
    variance = by_query(chosen.variance, pool, 0.0)
    visible = torch.arange(1, length + 1, device=variance.device)[None]
    budget = adaptive_budget(
        variance,
        variance_ema,
        visible,
        k_base=rule.k_base,
        k_min=rule.k_min,
        k_max=rule.k_max,
        adaptive_k=rule.adaptive_k,
    ).to(torch.int32)
    packed_mask = lists = density = None
    with launching_on(group_mask, "the indexer"):
        if length <= limits.PACKED_MASK_MAX_TOKENS:
            packed_mask = packed_keys_of_groups(group_mask, pool, range(length))
        measured = kernel == "auto" and length >= limits.MEASURED_FROM_TOKENS
        if packed_mask is None or kernel == "gathered" or measured:
            lists = _key_lists(group_mask, pool, length)
            density = union_density(lists)
            if packed_mask is None or kernel == "gathered" or density < limits.GATHERED_BELOW_DENSITY:
                packed_mask = None
            else:
                lists = None
    return Selection(packed_mask, lists, budget, variance, density, group_mask=group_mask)


def check_groups(geometry: Geometry, length: int) -> None:
    """Raises ValueError for what the kernels do not have."""
    pool, remedy = geometry.indexer_pool, "or use implementation='reference'"
    if pool not in limits.KEY_POOLS:
        raise ValueError(f"indexer_pool is {pool}; pass one of {limits.KEY_POOLS}, {remedy}")
    if length % pool or length < 2 * pool:
        raise ValueError(
            f"the sequence has {length} tokens with indexer_pool {pool}; pass two or more whole groups, {remedy}"
        )
    if geometry.document_starts is not None:
        raise ValueError(f"document_starts is given with indexer_pool {pool}; pass None, {remedy}")
    if geometry.query_start > 0:
        raise ValueError(f"query_start is {geometry.query_start} with indexer_pool {pool}; pass 0, {remedy}")
    if geometry.local_window > 0:
        raise ValueError(
            f"local_window is {geometry.local_window} with indexer_pool {pool}; pass 0, {remedy}"
        )


def indexer_of_groups(indexer: Indexer, pool: int) -> Indexer:
    """The p causal problems of each sequence: queries [B p, C, HI, DI], keys [B p, C, DI]. Differentiable."""
    length = indexer.queries.shape[1]
    rows = length // pool - 1

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return x[:, pool:].unflatten(1, (rows, pool)).transpose(1, 2).flatten(0, 1)

    keys = indexer.keys[:, : rows * pool : pool]
    return replace(
        indexer,
        queries=of_rows(indexer.queries),
        head_weight_logits=of_rows(indexer.head_weight_logits),
        keys=keys[:, None].expand(-1, pool, -1, -1).flatten(0, 1),
    )


def by_query(of_rows: torch.Tensor, pool: int, of_first_group: float) -> torch.Tensor:
    """[B p, C] -> [B, L]; the queries of the first group, which have no row, get a value of their own."""
    values = of_rows.unflatten(0, (-1, pool)).transpose(1, 2).flatten(1)
    return torch.nn.functional.pad(values, (pool, 0), value=of_first_group)


def rule_of_groups(rule: BudgetRule, pool: int) -> BudgetRule:
    """k_t // p as a rule of its own. Exact: p is a power of two, so that k_base / p times a number is rounded like
    k_base times it, and floor(floor(x) / p) = floor(x / p)."""
    if rule.k_base % pool or rule.k_min < pool or rule.dense_below > 0:
        raise ValueError(
            f"rule has k_base {rule.k_base}, k_min {rule.k_min} and dense_below {rule.dense_below} with indexer_pool "
            f"{pool}; pass a multiple of {pool}, {pool} or more, and 0, or use implementation='reference'"
        )
    return replace(rule, k_base=rule.k_base // pool, k_min=rule.k_min // pool, k_max=rule.k_max // pool)


def _key_lists(group_mask: torch.Tensor, pool: int, length: int) -> KeyLists:
    """By chunks of queries: two packed masks exist at a time. The host waits for the counts of each chunk."""
    step = limits.SELECTION_CHUNK_BYTES // 4 // (len(group_mask) // pool * limits.ceil_div(length, 8))
    step = max(step // limits.TILE_QUERIES, 1) * limits.TILE_QUERIES
    filled: list[FilledLists] = []
    waiting: CountedKeys | None = None
    # The longest rows first: the host's work for them is hidden by theirs.
    for start in reversed(range(0, length, step)):
        rows = range(start, min(start + step, length))
        counted = count_keys(packed_keys_of_groups(group_mask, pool, rows), rows)
        if waiting is not None:
            filled.append(fill_lists(waiting.wait()))
        waiting = counted
    assert waiting is not None
    filled.append(fill_lists(waiting.wait()))
    return join_lists(filled[::-1], length)
