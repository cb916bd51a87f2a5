"""Selections that blocks of queries share, as key lists or as a packed mask for the attention."""

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
    """S_t = (top-k of the block's first query, over keys at or before it) and the last `local_window` keys.

    The definition is `select_top_k`, `expand_block_selection`, `local_window_mask` and `causal_mask`. As with
    `select_keys`, which finds the top-k: exact for the scores this call calculates, no gradients, no waiting for the
    device, equal inputs give equal bits. What a query attends to does not depend on later tokens.

    Args:
        indexer: with a row for the first query of every block, R = ceil(L / selection_block)
        geometry: selection_block is 16, 32, 64 or 128; the window at least as many keys

    Returns:
        budget and variance: [B, R], of the rows
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
    """The selection of `select_block_lists` as a packed mask, a row for each query: for budgets that are a large part
    of the sequence."""
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
    """Adjacent chunks of rows whose packed mask, `row_bytes` a row, takes at most `most_bytes`; at least one chunk."""
    groups: list[list[range]] = [[]]
    for chunk in chunks:
        if groups[-1] and (chunk.stop - groups[-1][0].start) * row_bytes > most_bytes:
            groups.append([])
        groups[-1].append(chunk)
    return groups
