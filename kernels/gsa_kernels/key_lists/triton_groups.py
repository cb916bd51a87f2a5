"""Key lists of a selection of groups of neighbouring keys: lists of groups, whose entries become runs of keys.

The list of a tile of queries holds the groups that any of them chose, and all groups from the first key that its first
query reads in any case (`read_from`) to the tile's end. A group's keys share its word of membership, except for the
keys that a document's start, the own group or the window adds or leaves out.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_build import count_keys, fill_lists, join_lists
from gsa_kernels.limits import TILE_QUERIES, ceil_div
from gsa_kernels.selection.triton_group_keys import read_from
from gsa_kernels.types import Geometry

_ENTRIES = 256  # of a program


def lists_of_groups(group_mask: torch.Tensor, geometry: Geometry) -> tuple[KeyLists, KeyLists]:
    """The key lists of a selection, and its group lists (`Selection.group_lists`). The host waits for their size.

    Args:
        group_mask: int32 [B, L, ceil(G / 32)], contiguous
    """
    batch, length, _ = group_mask.shape
    pool, query_start, device = geometry.indexer_pool, geometry.query_start, group_mask.device
    starts = None if geometry.document_starts is None else geometry.document_starts.contiguous()
    first = torch.arange(query_start, query_start + length, TILE_QUERIES, dtype=torch.int32, device=device)
    last = (first + (TILE_QUERIES - 1)).clamp(max=query_start + length - 1)
    read = torch.minimum(first // pool * pool, first - (geometry.local_window - 1)).clamp(min=0)[None]
    if starts is not None:
        read = read.maximum(starts[:, ::TILE_QUERIES])
    always = (torch.stack([read, last.expand_as(read)], -1) // pool).expand(batch, -1, -1).contiguous()
    counted = count_keys(group_mask, range(length), query_start, always)
    groups = join_lists([fill_lists(counted.wait())], length, query_start)
    assert groups.host_counts is not None
    groups.keys.mul_(pool)
    keys = torch.empty(groups.keys.numel() * pool, dtype=torch.int32, device=device)
    lists = replace(
        groups,
        keys=keys,
        words=torch.empty_like(keys),
        starts=groups.starts * pool,
        # The last group of a tile may go on after its last query.
        counts=groups.counts * pool - (pool - 1 - last % pool),
        max_count=groups.max_count * pool,
        host_counts=groups.host_counts * pool,
    )
    _keys_kernel[(ceil_div(lists.max_count, _ENTRIES), len(last), batch)](
        groups.keys,
        groups.words,
        groups.starts,
        starts,
        lists.keys,
        lists.words,
        lists.counts,
        always,
        query_start,
        length,
        geometry.local_window,
        POOL=pool,
        QUERIES=TILE_QUERIES,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )
    return lists, groups


@triton.jit(do_not_specialize=["query_start", "length", "local_window"])
def _keys_kernel(
    groups, group_words, group_starts, starts, keys, words, counts, always, query_start, length, local_window,
    POOL: tl.constexpr, QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of entries, tiles, B)."""
    tile, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = batch * tl.num_programs(1) + tile
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < tl.load(counts + slot)
    group_start = tl.load(group_starts + slot)
    key = tl.load(groups + group_start + entry // POOL, mask=inside, other=0) + entry % POOL
    word = tl.load(group_words + group_start + entry // POOL, mask=inside, other=0)
    in_any_case = tl.load(always + 2 * slot) * POOL
    if starts is not None:  # a document may begin inside any group
        in_any_case = in_any_case * 0
    if tl.max(tl.where(inside, key, 0)) >= in_any_case:
        for r in tl.static_range(QUERIES):
            number = tile * QUERIES + r
            query = query_start + number
            document_start = number * 0
            if starts is not None:
                document_start = tl.load(starts + batch * length + number, mask=number < length, other=0)
            first = read_from(query, document_start, local_window, POOL)
            word |= ((key >= first) & (key <= query)).to(tl.int32) << r
            word &= ~((key < document_start).to(tl.int32) << r)
    tl.store(keys + group_start * POOL + entry, key, mask=inside)
    tl.store(words + group_start * POOL + entry, word, mask=inside)
