"""Sums partial rows, one for each entry of a tile's list, into one row per key.

This module computes the gradients of gathered keys without atomics. First, a kernel loops over the lists and stores one
partial row for each entry of each tile. `find_key_hits` then lists the partial rows of each key, in ascending order of
their tiles. `add_partials_by_key` adds the partial rows in this order, so results repeat bit for bit.

Tiles are numbered across sequences: with T tiles per sequence, tile i of sequence b has the number b * T + i. To limit
memory, the tiles are processed in ranges, and memory holds the partial rows of one range at a time.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_build import copy_to_device
from gsa_kernels.limits import ceil_div, next_power_of_2

_ENTRIES = 1024


@dataclass(frozen=True)
class KeyHits:
    """Lists the partial rows of every key, for the tiles first_tile <= b * T + i < last_tile."""

    starts: torch.Tensor
    """int32 [B * Lk + 1]: the partial rows of key s of sequence b are the entries starts[b * Lk + s] to
    starts[b * Lk + s + 1] - 1 of `rows`."""

    rows: torch.Tensor
    """int32 [num_rows]: numbers of the partial rows of each key, in the order of the tiles. Only the first starts[-1]
    entries are used."""

    num_rows: int
    """Number of partial rows of all tiles, including partial rows without an entry."""


@dataclass(frozen=True)
class TileRows:
    """Describes the range of tiles `first` to `last - 1`.

    The partial row of entry j of tile n is row starts[n - first] + j.
    """

    first: int
    last: int
    starts: torch.Tensor
    """int64 [last - first]"""
    order: torch.Tensor
    """int32 [last - first]: the tiles, numbered from `first`, with the longest list first."""
    num_rows: int
    """Partial rows of the range."""


def split_tiles(lists: KeyLists, max_rows: int, multiple: int = 1) -> list[TileRows]:
    """Split the tiles into ranges of at most `max_rows` partial rows. If one tile has more partial rows, it is a range
    of its own. The numbers of partial rows come from `host_counts`.

    Args:
        multiple: a range has a multiple of this number of tiles, if `max_rows` allows
    """
    num_tiles = lists.counts.numel()
    sizes = lists.host_counts.read().flatten().long()
    assert len(sizes) == num_tiles, "lists of a chunk"
    ends = sizes.cumsum(0)
    starts, orders = ends - sizes, torch.empty(num_tiles, dtype=torch.int32)
    borders, first = [0], 0
    while first < num_tiles:
        before = int(starts[first])
        last = int(torch.searchsorted(ends, before + max_rows, right=True))
        if first + multiple <= last < num_tiles:
            last -= (last - first) % multiple
        last = max(last, first + 1)
        # If all tiles have the same size, the last one runs first.
        orders[first:last] = (
            last - first - 1 - sizes[first:last].flip(0).argsort(stable=True, descending=True)
        )
        starts[first:last] -= before
        borders.append(last)
        first = last
    there_starts, there_orders = (copy_to_device(x, lists.counts.device) for x in (starts, orders))
    return [
        TileRows(
            first,
            last,
            there_starts[first:last],
            there_orders[first:last],
            int(starts[last - 1] + sizes[last - 1]),
        )
        for first, last in pairwise(borders)
    ]


def equal_tiles(lists: KeyLists, size: int) -> TileRows:
    """Return all tiles, with `size` partial rows each, at least `max_count`."""
    num_tiles, device = lists.counts.numel(), lists.counts.device
    starts = torch.arange(num_tiles, device=device) * size
    order = torch.arange(num_tiles - 1, -1, -1, dtype=torch.int32, device=device)
    return TileRows(0, num_tiles, starts, order, num_tiles * size)


def find_key_hits(lists: KeyLists, tile_rows: TileRows) -> KeyHits:
    """For each key, list its partial rows in a range of tiles, on the device.

    The result takes 4 bytes per partial row. The computation needs B * Lk * tiles / 4 bytes of scratch memory, where
    `tiles` is the number of tiles in the range.
    """
    batch, tiles_per_sequence = lists.counts.shape
    first_tile, num_rows = tile_rows.first, tile_rows.num_rows
    tiles = tile_rows.last - first_tile
    check_at_least("first", first_tile, 0)
    check_at_least("last - first", tiles, 1)
    check_at_least("B * T - last", batch * tiles_per_sequence - tile_rows.last, 0)
    if num_rows >= 2**31:
        raise ValueError(f"{tiles} tiles have {num_rows} rows; pass a range of tiles with less than 2^31")
    device = lists.keys.device
    num_keys = batch * lists.num_keys
    columns = ceil_div(tiles, 32)
    # Bit i % 32 of marks[s, i // 32] says that tile i lists key s. The number of earlier bits is the tile's place among
    # the hits of s. `before` counts the bits in earlier words.
    marks = torch.zeros(num_keys, columns, dtype=torch.int32, device=device)
    before = torch.empty_like(marks)
    starts = torch.zeros(num_keys + 1, dtype=torch.int32, device=device)
    rows = torch.empty(max(num_rows, 1), dtype=torch.int32, device=device)
    grid = (tiles, ceil_div(max(lists.max_count, 1), _ENTRIES))
    entry_args = (lists.keys, lists.starts, lists.counts, first_tile, tiles_per_sequence, lists.num_keys)
    _mark_kernel[grid](*entry_args, marks, columns, ENTRIES=_ENTRIES, num_warps=4)
    keys = max(1, 1024 // next_power_of_2(columns))
    counts = torch.empty(num_keys, dtype=torch.int32, device=device)
    _count_kernel[(ceil_div(num_keys, keys),)](
        marks,
        before,
        counts,
        num_keys,
        columns,
        KEYS=keys,
        COLUMNS=next_power_of_2(columns),
        num_warps=4,
    )
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    _place_kernel[grid](
        *entry_args, marks, before, starts, rows, columns, tile_rows.starts, ENTRIES=_ENTRIES, num_warps=4
    )
    return KeyHits(starts=starts, rows=rows, num_rows=num_rows)


def add_partials_by_key(partials: torch.Tensor, hits: KeyHits, out: torch.Tensor) -> None:
    """For each key s, add the sum of the key's partial rows to out[b, s, n], in fp32 and in the order of the tiles.

    Args:
        partials: [N, num_rows, C], contiguous; C a power of two up to 1024; bf16 or fp32. Rows without an entry are not
            read.
        out: fp32 [B, Lk, N, C], the last dimension contiguous. Keys without hits do not change.
    """
    check_shape("partials", partials, "[N, num_rows, C]", (None, hits.num_rows, None))
    number, _, channels = partials.shape
    check_shape("out", out, "[B, Lk, N, C]", (None, None, number, channels))
    if channels & (channels - 1) or not 16 <= channels <= 1024:
        raise ValueError(f"partials has {channels} channels; pass a power of two from 16 to 1024")
    if out.shape[0] * out.shape[1] != len(hits.starts) - 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; pass B * Lk = {len(hits.starts) - 1} rows")
    if out.dtype != torch.float32 or out.stride(3) != 1:
        raise ValueError(
            f"out is {out.dtype}, stride {out.stride(3)}; pass float32, last dimension contiguous"
        )
    if not partials.is_contiguous():
        raise ValueError("partials has gaps; pass a contiguous tensor")
    # Each key takes one warp with four rows of 512 bytes in flight.
    rows = max(1, min(32, 2048 // (channels * partials.element_size())))
    _add_kernel[(out.shape[0] * out.shape[1], number)](
        partials, hits.starts, hits.rows, out, *out.stride()[:3], out.shape[1], hits.num_rows,
        CHANNELS=channels, ROWS=rows, num_warps=1,
    )  # fmt: skip


@triton.jit
def _load_entries(keys, key_starts, counts, first_tile, tiles_per_sequence, length, ENTRIES: tl.constexpr):
    """Load part of one tile's list. Return the indices of the entries, whether the entries exist, and their keys s,
    numbered b * Lk + s."""
    tile = first_tile + tl.program_id(0)
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    valid = entries < tl.load(counts + tile)
    key = tl.load(keys + tl.load(key_starts + tile) + entries, mask=valid, other=0)
    return entries, valid, (tile // tiles_per_sequence).to(tl.int64) * length + key


@triton.jit(do_not_specialize=["first_tile", "columns"])
def _mark_kernel(
    keys, key_starts, counts, first_tile, tiles_per_sequence, length, marks, columns, ENTRIES: tl.constexpr
):  # fmt: skip
    _, valid, key = _load_entries(keys, key_starts, counts, first_tile, tiles_per_sequence, length, ENTRIES)
    number = tl.program_id(0)
    bit = tl.full([ENTRIES], 1, tl.int32) << (number % 32)
    tl.atomic_or(marks + key * columns + number // 32, bit, mask=valid, sem="relaxed")


@triton.jit
def _population(word):
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit(do_not_specialize=["columns"])
def _count_kernel(marks, before, counts, num_keys, columns, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    mask = (key < num_keys)[:, None] & (column < columns)[None, :]
    position = key[:, None] * columns + column[None, :]
    population = _population(tl.load(marks + position, mask=mask, other=0))
    tl.store(before + position, tl.cumsum(population, 1) - population, mask=mask)
    tl.store(counts + key, tl.sum(population, 1), mask=key < num_keys)


@triton.jit(do_not_specialize=["first_tile", "columns", "row_starts"])
def _place_kernel(
    keys, key_starts, counts, first_tile, tiles_per_sequence, length, marks, before, starts, rows, columns,
    row_starts, ENTRIES: tl.constexpr,
):  # fmt: skip
    entries, valid, key = _load_entries(
        keys, key_starts, counts, first_tile, tiles_per_sequence, length, ENTRIES
    )
    number = tl.program_id(0)
    position = key * columns + number // 32
    below = (tl.full([ENTRIES], 1, tl.int32) << (number % 32)) - 1
    place = tl.load(starts + key, mask=valid, other=0) + tl.load(before + position, mask=valid, other=0)
    place += _population(tl.load(marks + position, mask=valid, other=0) & below)
    tl.store(rows + place, (tl.load(row_starts + number) + entries).to(tl.int32), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(
    partials, starts, rows, out, stride_ob, stride_ol, stride_on, length, num_rows,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program sums the partial rows of one key, for one of the N members."""
    key = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    partials += number * num_rows * CHANNELS
    out += number * stride_on
    first = tl.load(starts + key)
    last = tl.load(starts + key + 1)
    if first < last:
        channels = tl.arange(0, CHANNELS)
        acc = tl.zeros([ROWS, CHANNELS], tl.float32)
        for start in range(first, last, ROWS):
            hit = start + tl.arange(0, ROWS)
            row = tl.load(rows + hit, mask=hit < last, other=0).to(tl.int64)
            pointers = partials + (row[:, None] * CHANNELS + channels[None, :])
            acc += tl.load(pointers, mask=(hit < last)[:, None], other=0.0).to(tl.float32)
        target = out + (key // length).to(tl.int64) * stride_ob + (key % length).to(tl.int64) * stride_ol
        tl.store(target + channels, tl.load(target + channels) + tl.sum(acc, 0))
