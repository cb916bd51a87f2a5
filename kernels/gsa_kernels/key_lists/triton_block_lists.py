"""Builds key lists of a selection that blocks of queries share.

The queries of an aligned block attend to the top-k of the block's first query and to their own local windows. The list
of a block starts with the top-k keys before all windows, in ascending order; all queries attend to them. All keys from
the first query's window to the block's end follow, with membership words. Each block reserves memory for the most keys
that its budget allows, so that the host need not wait for the device.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import TILE_QUERIES, ceil_div
from gsa_kernels.selection.triton_search import count_bits, window_words
from gsa_kernels.types import Geometry

_ALIGNMENT = 32  # entries: 128 bytes
# Words of a block's row per step, and columns of its window per step. More words are slower (docs/kernels.md, Tuning).
_WORDS, _COLUMNS = 256, 128


def empty_block_lists(
    batch: int, length: int, most_keys: int, geometry: Geometry, device: torch.device
) -> KeyLists:
    """Create lists of all queries in tiles of min(selection_block, 32), for `fill_block_lists`.

    The tiles of a block share their keys.

    Args:
        length: L
        most_keys: largest top-k of a block
    """
    queries = min(geometry.selection_block, TILE_QUERIES)
    blocks, tiles = ceil_div(length, geometry.selection_block), ceil_div(length, queries)
    num_keys = geometry.query_start + length
    max_count = min(min(most_keys, num_keys) + _window_room(geometry, num_keys), num_keys)
    key_room, word_room = _rooms(max_count, geometry, num_keys)
    tiles_per_block = geometry.selection_block // queries
    return KeyLists(
        keys=torch.empty(batch * blocks * key_room, dtype=torch.int32, device=device),
        words=torch.empty(batch * blocks * tiles_per_block * word_room, dtype=torch.int32, device=device),
        key_starts=torch.empty((batch, tiles), dtype=torch.int64, device=device),
        word_starts=torch.empty((batch, tiles), dtype=torch.int64, device=device),
        full=torch.empty((batch, tiles), dtype=torch.int32, device=device),
        counts=torch.empty((batch, tiles), dtype=torch.int32, device=device),
        queries=queries,
        length=length,
        max_count=max_count,
        query_start=geometry.query_start,
    )


def fill_block_lists(packed_mask: torch.Tensor, rows: range, lists: KeyLists, geometry: Geometry) -> None:
    """Fill the lists of some blocks from the top-k of their first queries.

    If a tile contains a query of a later document than the block's first query, the tile has no full part, because this
    query does not attend to the top-k.

    Args:
        packed_mask: int32 [B, rows, W], at most most_keys bits in a row; contiguous
        rows: the blocks
        lists: created by `empty_block_lists`
    """
    selection_block, query_start = geometry.selection_block, geometry.query_start
    document_starts = None if geometry.document_starts is None else geometry.document_starts.contiguous()
    batch, _, words_per_row = packed_mask.shape
    num_keys = query_start + lists.length
    key_room, word_room = _rooms(lists.max_count, geometry, num_keys)
    _block_lists_kernel[(len(rows), batch)](
        packed_mask,
        document_starts,
        lists.keys,
        lists.words,
        lists.key_starts,
        lists.word_starts,
        lists.full,
        lists.counts,
        rows.start,
        ceil_div(lists.length, selection_block),
        lists.length,
        query_start,
        lists.counts.shape[1],
        words_per_row,
        min(geometry.local_window, num_keys),
        key_room,
        word_room,
        BLOCK=selection_block,
        QUERIES=lists.queries,
        WORDS=_WORDS,
        COLUMNS=_COLUMNS,
        POPC=packed_mask.is_cuda,  # the interpreter runs on the CPU and does not support inline assembly
        num_warps=8,
    )


def _window_room(geometry: Geometry, num_keys: int) -> int:
    return min(geometry.local_window + geometry.selection_block - 1, num_keys)


def _rooms(max_count: int, geometry: Geometry, num_keys: int) -> tuple[int, int]:
    """Return the reserved entries for a block's keys and for a tile's words."""
    keys = _aligned(max_count)
    # Without documents only the keys of the window have words.
    return keys, _aligned(_window_room(geometry, num_keys)) if geometry.document_starts is None else keys


def _aligned(entries: int) -> int:
    return ceil_div(entries, _ALIGNMENT) * _ALIGNMENT


@triton.jit(do_not_specialize=["first_block", "blocks", "length", "query_start", "num_tiles"])
def _block_lists_kernel(
    words_ptr,  # [B, blocks of the grid, W] int32
    starts_ptr,  # [B, L] int32
    keys_ptr,  # out: [B * R * key_room] int32
    masks_ptr,  # out: [B * R * tiles per block * word_room] int32
    key_starts_ptr,  # out: [B, T] int64, and so on
    word_starts_ptr,
    full_ptr,
    counts_ptr,
    first_block,
    blocks,
    length,
    query_start,
    num_tiles,
    words_per_row,
    local_window,
    key_room,
    word_room,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POPC: tl.constexpr,
):
    """One program fills the list of one block. Grid: (blocks from first_block on, B); long rows run first."""
    local = tl.num_programs(0) - 1 - tl.program_id(0)
    block = first_block + local
    batch = tl.program_id(1).to(tl.int64)
    first = query_start + block * BLOCK
    last = tl.minimum(first + BLOCK, query_start + length) - 1
    visible_from = block * 0
    if starts_ptr is not None:
        starts_ptr += batch * length
        visible_from = tl.load(starts_ptr + block * BLOCK)
    window_from = tl.maximum(first - local_window + 1, visible_from)
    window_count = last + 1 - window_from
    words_ptr += (batch * tl.num_programs(0) + local) * words_per_row
    key_start = (batch * blocks + block) * key_room
    keys_ptr += key_start

    # This writes the top-k before the window. The bits before a word determine the places of its keys. Words have few
    # bits, k / (t / 32) on average. All words therefore store their lowest bit at once, then their next bit, and so on.
    count = block * 0
    for word in range(visible_from // 32, (window_from + 31) // 32, WORDS):
        index = word + tl.arange(0, WORDS)
        bits = tl.load(words_ptr + index, mask=index < words_per_row, other=0)
        bits &= window_words(index, 0, window_from - 1)
        in_word = count_bits(bits, POPC)
        place = count + tl.cumsum(in_word, axis=0) - in_word
        count += tl.sum(in_word)
        for _ in range(tl.max(in_word)):
            lowest = count_bits((bits & -bits) - 1, POPC)
            tl.store(keys_ptr + place, index * 32 + lowest, mask=bits != 0)
            bits &= bits - 1
            place += 1

    for column in range(window_from, last + 1, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        tl.store(keys_ptr + count + columns - window_from, columns, mask=columns <= last)

    member = tl.arange(0, QUERIES)
    for part in tl.static_range(BLOCK // QUERIES):
        tile = block * (BLOCK // QUERIES) + part
        if tile < num_tiles:
            queries = tile * QUERIES + member
            rows = query_start + queries
            row_starts = rows * 0
            full = count
            word_start = ((batch * blocks + block) * (BLOCK // QUERIES) + part) * word_room
            if starts_ptr is not None:
                row_starts = tl.load(starts_ptr + queries, mask=queries < length, other=0)
                if tl.max(row_starts) > first:
                    # Some queries belong to a later document and attend to none of the top-k.
                    full = block * 0
                    uniform = tl.sum((row_starts <= first).to(tl.int32) << member)
                    for entry in range(0, count, COLUMNS):
                        entries = entry + tl.arange(0, COLUMNS)
                        masks = tl.zeros([COLUMNS], tl.int32) + uniform
                        tl.store(masks_ptr + word_start + entries, masks, mask=entries < count)
            slot = batch * num_tiles + tile
            tl.store(key_starts_ptr + slot, key_start)
            tl.store(word_starts_ptr + slot, word_start)
            tl.store(full_ptr + slot, full)
            tl.store(counts_ptr + slot, count + window_count)

            window_ptr = masks_ptr + word_start + (count - full)
            for column in range(window_from, last + 1, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)
                bits = tl.load(words_ptr + columns // 32, mask=columns <= last, other=0)
                top = ((bits >> (columns % 32)) & 1) != 0
                distance = rows[None, :] - columns[:, None]
                hit = (distance >= 0) & (columns[:, None] >= row_starts[None, :])
                hit = hit & (top[:, None] | (distance < local_window))
                masks = tl.sum(hit.to(tl.int32) << member[None, :], axis=1)
                tl.store(window_ptr + (columns - window_from), masks, mask=columns <= last)
