"""Selects keys for blocks of queries that share a selection, as key lists or as a packed mask."""

import torch

from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.triton_block_lists import empty_block_lists, fill_block_lists
from gsa_kernels.limits import SELECTION_BLOCKS, SELECTION_CHUNK_BYTES, ceil_div
from gsa_kernels.selection.criteria import Outputs
from gsa_kernels.selection.op import Selector, select_keys
from gsa_kernels.selection.triton_block_mask import expand_block_mask
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection


@torch.no_grad()
def select_block_lists(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    *,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
) -> Selection:
    """Select S_t: the top-k of the block's first query, over keys at or before it, and the last `local_window` keys.

    `select_top_k`, `expand_block_selection`, `local_window_mask` and `causal_mask` define the result. `select_keys`
    finds the top-k, which is exact for the scores of this call. There are no gradients, the host does not wait for the
    device, and equal inputs give equal bits. The keys of a query do not depend on later tokens.

    Args:
        indexer: one row for the first query of each block, R = ceil(L / selection_block)
        geometry: selection_block is 16, 32, 64 or 128; local_window is at least selection_block

    Returns:
        a selection whose budget and variance are [B, R]
    """
    _check_block(geometry)
    with launching_on(indexer.queries, "the indexer"):
        selector = Selector(indexer, rule, variance_ema, geometry, row_chunk_bytes, None)
        (batch, num_rows), num_keys = indexer.queries.shape[:2], indexer.keys.shape[1]
        device = indexer.queries.device
        budget = torch.empty((batch, num_rows), dtype=torch.int32, device=device)
        variance = torch.empty((batch, num_rows), dtype=torch.float32, device=device)
        lists = empty_block_lists(
            batch, num_keys - geometry.query_start, rule.most_keys, geometry, budget.device
        )
        columns = ceil_div(num_keys, 32)
        for chunks in _together(selector.chunks, 4 * batch * columns, row_chunk_bytes):
            rows = range(chunks[0].start, chunks[-1].stop)
            packed_mask = torch.zeros((batch, len(rows), columns), dtype=torch.int32, device=device)
            for chunk in chunks:
                selector.select(chunk, Outputs(packed_mask, budget, variance, rows.start))
            fill_block_lists(packed_mask, rows, lists, geometry)
    return Selection(None, lists, budget, variance)


@torch.no_grad()
def select_block_mask(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    *,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
) -> Selection:
    """Return the selection of `select_block_lists` as a packed mask with a row per query. This format suits budgets
    that are a large part of the sequence."""
    _check_block(geometry)
    top_k = select_keys(indexer, rule, variance_ema, geometry, row_chunk_bytes=row_chunk_bytes)
    assert top_k.packed_mask is not None
    with launching_on(indexer.queries, "the indexer"):
        packed_mask = expand_block_mask(top_k.packed_mask, indexer.keys.shape[1], geometry)
    return Selection(packed_mask, None, top_k.budget, top_k.variance)


def _check_block(geometry: Geometry) -> None:
    if geometry.selection_block not in SELECTION_BLOCKS[1:]:
        raise ValueError(f"selection_block is {geometry.selection_block}; pass one of {SELECTION_BLOCKS[1:]}")


def _together(chunks: list[range], row_bytes: int, most_bytes: int) -> list[list[range]]:
    """Join adjacent chunks while their packed mask, with `row_bytes` per row, takes at most `most_bytes`."""
    groups: list[list[range]] = [[]]
    for chunk in chunks:
        if groups[-1] and (chunk.stop - groups[-1][0].start) * row_bytes > most_bytes:
            groups.append([])
        groups[-1].append(chunk)
    return groups
