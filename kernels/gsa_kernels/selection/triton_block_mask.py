"""Builds the packed mask of a selection that blocks of queries share. Each query gets the causal part of its block's
top-k, and its own local window."""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import ceil_div
from gsa_kernels.selection.triton_search import window_words
from gsa_kernels.types import Geometry

_QUERIES, _WORDS = 16, 128
"""Queries and words per program. The queries share a block, so that the program loads the words of their top-k once."""


def expand_block_mask(top_k: torch.Tensor, num_keys: int, geometry: Geometry) -> torch.Tensor:
    """Expand rows of blocks to rows of queries.

    Args:
        top_k: int32 [B, R, W], W = ceil(Lk / 32): a bit for each key that the block's first query selects; contiguous
        num_keys: Lk

    Returns:
        int32 [B, L, W]
    """
    batch, num_rows, words = top_k.shape
    length = num_keys - geometry.query_start
    starts = None if geometry.document_starts is None else geometry.document_starts.contiguous()
    packed_mask = torch.empty((batch, length, words), dtype=torch.int32, device=top_k.device)
    _expand_kernel[(ceil_div(words, _WORDS), ceil_div(length, _QUERIES), batch)](
        top_k,
        starts,
        packed_mask,
        num_rows,
        length,
        words,
        geometry.query_start,
        min(geometry.local_window, num_keys),
        BLOCK=geometry.selection_block,
        QUERIES=_QUERIES,
        WORDS=_WORDS,
        num_warps=4,
    )
    return packed_mask


@triton.jit(do_not_specialize=["num_rows", "length", "query_start"])
def _expand_kernel(
    top_k,  # [B, R, W] int32
    document_starts,  # [B, L] int32, or None
    packed_mask,  # out: [B, L, W] int32
    num_rows,
    length,
    words,
    query_start,
    local_window,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program computes WORDS words each of QUERIES queries of one block. Grid: (words, queries, B)."""
    tl.static_assert(BLOCK % QUERIES == 0, "the queries of a program share their selection")
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * QUERIES
    queries = first + tl.arange(0, QUERIES)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    chosen = tl.load(top_k + (batch * num_rows + first // BLOCK) * words + word, mask=word < words, other=0)

    positions = query_start + queries
    visible_from = positions * 0
    if document_starts is not None:
        visible_from = tl.load(document_starts + batch * length + queries, mask=queries < length, other=0)
    window_from = tl.maximum(positions - local_window + 1, visible_from)
    seen = window_words(word[None, :], visible_from[:, None], positions[:, None])
    near = window_words(word[None, :], window_from[:, None], positions[:, None])
    places = (batch * length + queries)[:, None] * words + word[None, :]
    tl.store(
        packed_mask + places,
        (chosen[None, :] & seen) | near,
        mask=(queries < length)[:, None] & (word < words)[None, :],
    )
