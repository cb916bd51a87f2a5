"""Selections that blocks of queries share, as key lists for the attention."""

import torch

from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.triton_block_lists import block_key_lists
from gsa_kernels.limits import SELECTION_BLOCKS, SELECTION_CHUNK_BYTES
from gsa_kernels.selection.op import select_keys
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
    if geometry.selection_block not in SELECTION_BLOCKS[1:]:
        raise ValueError(f"selection_block is {geometry.selection_block}; pass one of {SELECTION_BLOCKS[1:]}")
    top_k = select_keys(indexer, rule, variance_ema, geometry, row_chunk_bytes=row_chunk_bytes)
    assert top_k.packed_mask is not None
    with launching_on(indexer.queries, "the indexer"):
        length = indexer.keys.shape[1] - geometry.query_start
        lists = block_key_lists(top_k.packed_mask, length, rule.most_keys, geometry)
    return Selection(None, lists, top_k.budget, top_k.variance)
