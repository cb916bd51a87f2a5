"""Computes the packed mask of selected queries from key lists."""

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_shape
from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import TILE_QUERIES, ceil_div

_ENTRIES = 1024


def packed_mask_of_rows(lists: KeyLists, rows: torch.Tensor) -> torch.Tensor:
    """Return the selected keys S_t of the queries t = rows[i] as a packed mask. For each query, the kernel reads the
    whole list of its tile.

    Args:
        rows: int64 [R], numbers of queries, 0 <= t < lists.length

    Returns:
        int32 [B, R, ceil(Lk / 32)]: bit s % 32 of word s // 32 says that the query selects key s
    """
    check_shape("rows", rows, "[R]", (None,))
    batch, tiles = lists.counts.shape
    columns = ceil_div(lists.num_keys, 32)
    packed_mask = torch.zeros(batch, len(rows), columns, dtype=torch.int32, device=lists.keys.device)
    if len(rows) == 0:
        return packed_mask
    with launching_on(lists.keys, "lists.keys"):
        _words_kernel[(len(rows), batch)](
            lists.keys,
            lists.words,
            lists.starts,
            lists.counts,
            rows.contiguous(),
            packed_mask,
            tiles,
            columns,
            QUERIES=TILE_QUERIES,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
    return packed_mask


@triton.jit
def _words_kernel(
    keys, masks, starts, counts, rows, words, tiles, columns, QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One program takes one query and all entries of its tile. No other program writes to its row."""
    row = tl.load(rows + tl.program_id(0))
    tile = tl.program_id(1) * tiles + row // QUERIES
    bit = (row % QUERIES).to(tl.int32)
    first = tl.load(starts + tile)
    keys += first
    masks += first
    count = tl.load(counts + tile)
    words += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * columns
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        key = tl.load(keys + entry, mask=entry < count, other=0)
        mask = tl.load(masks + entry, mask=entry < count, other=0)
        one = tl.full([ENTRIES], 1, tl.int32) << (key % 32)
        tl.atomic_or(words + key // 32, one, mask=((mask >> bit) & 1) != 0, sem="relaxed")
