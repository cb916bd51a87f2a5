"""Selected groups of keys -> the packed mask of their keys."""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import ceil_div
from gsa_kernels.selection.triton_search import window_words
from gsa_kernels.types import Geometry

_ROWS, _WORDS = 8, 128  # of a program


def packed_keys_of_groups(group_mask: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The keys of the groups that each query chose, of its own group up to itself, and of its local window.

    Args:
        group_mask: int32 [B, L, ceil(G / 32)], contiguous

    Returns:
        int32 [B, L, ceil(Lk / 32)]
    """
    batch, length, group_words = group_mask.shape
    num_words = ceil_div(geometry.query_start + length, 32)
    starts = None if geometry.document_starts is None else geometry.document_starts.contiguous()
    out = torch.empty((batch, length, num_words), dtype=torch.int32, device=group_mask.device)
    grid = (ceil_div(length, _ROWS), ceil_div(num_words, _WORDS), batch)
    _keys_of_groups_kernel[grid](
        group_mask,
        starts,
        out,
        geometry.query_start,
        length,
        num_words,
        group_words,
        geometry.local_window,
        POOL=geometry.indexer_pool,
        ROWS=_ROWS,
        WORDS=_WORDS,
        num_warps=4,
    )
    return out


@triton.jit
def _doubled(bits):
    """Each of the lower 16 bits twice: bit i becomes bits 2 i and 2 i + 1."""
    bits = (bits | (bits << 8)) & 0x00FF00FF
    bits = (bits | (bits << 4)) & 0x0F0F0F0F
    bits = (bits | (bits << 2)) & 0x33333333
    bits = (bits | (bits << 1)) & 0x55555555
    return bits | (bits << 1)


@triton.jit
def read_from(position, document_start, local_window, POOL: tl.constexpr):
    """The first key of the run of keys up to itself that a query reads in any case: its own group and its window."""
    own = position // POOL * POOL
    return tl.maximum(tl.minimum(own, position - local_window + 1), document_start)


@triton.jit(do_not_specialize=["query_start", "local_window"])
def _keys_of_groups_kernel(
    group_mask, starts, out, query_start, length, num_words, group_words, local_window,
    POOL: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, word tiles, B). Word w has the keys of 32 / POOL groups, or a part of one group, which are in
    word w / POOL of the groups."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row = tl.program_id(2).to(tl.int64) * length + number
    query = query_start + number
    valid = (number < length)[:, None] & (word < num_words)[None, :]
    document_start = number * 0
    if starts is not None:
        document_start = tl.load(starts + row, mask=number < length, other=0)
    groups = tl.load(group_mask + row[:, None] * group_words + (word // POOL)[None, :], mask=valid, other=0)
    size: tl.constexpr = POOL
    if size > 32:
        keys = -((groups >> (word % POOL // (POOL // 32))[None, :]) & 1)
    else:
        keys = groups >> (word % POOL * (32 // POOL))[None, :]
        keys = keys & ((1 << (32 // POOL)) - 1)
        if size >= 2:
            keys = _doubled(keys)
        if size >= 4:
            keys = _doubled(keys)
        if size >= 8:
            keys = _doubled(keys)
        if size >= 16:
            keys = _doubled(keys)
        if size >= 32:
            keys = _doubled(keys)
    first = read_from(query, document_start, local_window, POOL)
    keys |= window_words(word[None, :], first[:, None], query[:, None])
    if starts is not None:  # a document may begin inside a chosen group
        keys &= window_words(word[None, :], document_start[:, None], query[:, None])
    tl.store(out + row[:, None] * num_words + word[None, :], keys, mask=valid)
