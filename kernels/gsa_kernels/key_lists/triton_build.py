"""Builds key lists from packed masks. The kernels transpose 32 by 32 bits and drop columns without a bit.

The size of the lists depends on the data, so the host does not know it in advance. `count_keys` counts the keys on the
device. There are two ways to allocate the lists:
- `roomy_lists` gives each tile room for all its causal keys, so the host does not wait. The lists of a whole sequence
  then take as much memory as its packed mask.
- `fill_lists` waits until the host knows the counts, and allocates exactly as much. For long sequences, this saves much
  memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.key_lists.format import HostCounts, KeyLists
from gsa_kernels.limits import TILE_QUERIES, ceil_div
from gsa_kernels.selection.triton_search import count_bits

_WORDS = 128  # words of each row that a program transposes: 4096 keys


@dataclass(frozen=True)
class CountedKeys:
    """Holds the key counts of adjacent tiles, which may not have reached the host yet."""

    packed_mask: torch.Tensor
    """int32 [B, rows, W], the selection; it must not change before the lists are filled."""

    first_diagonal: int
    """Word i + first_diagonal of a row contains the position of the last query in tile i, or comes after it."""

    counts_of_pieces: torch.Tensor
    """int32 [B, tiles, pieces]"""

    counts: torch.Tensor
    """int32 [B, tiles]"""

    host_counts: HostCounts


@dataclass(frozen=True)
class FilledLists:
    """Holds the lists of adjacent tiles, with the fields of `KeyLists`. Starts count from these tiles' first entry."""

    keys: torch.Tensor
    words: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    host_counts: HostCounts


def count_keys(packed_mask: torch.Tensor, rows: range, query_start: int = 0) -> CountedKeys:
    """Count, for each tile of 32 queries, the keys that any of them selects.

    Args:
        packed_mask: int32 [B, rows, W]. Bits after the tile's last query are not read.
        rows: the queries, from a multiple of 32 on
        query_start: position of query 0
    """
    batch, num_rows, num_words = packed_mask.shape
    tiles, pieces = ceil_div(num_rows, TILE_QUERIES), ceil_div(num_words, _WORDS)
    of_pieces = torch.empty((batch, tiles, pieces), dtype=torch.int32, device=packed_mask.device)
    first_diagonal = rows.start // TILE_QUERIES + (query_start + TILE_QUERIES - 1) // TILE_QUERIES
    _count_kernel[(pieces, tiles, batch)](
        packed_mask,
        of_pieces,
        first_diagonal,
        num_rows,
        num_words,
        QUERIES=TILE_QUERIES,
        WORDS=_WORDS,
        num_warps=4,
    )
    counts = of_pieces.sum(-1, dtype=torch.int32)
    on_host, copied = copy_to_host(counts), None
    if packed_mask.is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    return CountedKeys(packed_mask, first_diagonal, of_pieces, counts, HostCounts(on_host, copied))


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host without waiting. Read the copy after an event that is recorded after the copy."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def roomy_lists(packed_mask: torch.Tensor, query_start: int = 0) -> KeyLists:
    """Return key lists for whole sequences. The host does not wait for the counts, because each tile gets room for all
    its causal keys.

    Args:
        packed_mask: int32 [B, L, W]; no query selects a later key
        query_start: position of query 0
    """
    batch, length, _ = packed_mask.shape
    counted = count_keys(packed_mask, range(length), query_start)
    device, tiles = packed_mask.device, counted.counts.shape[1]

    def room_before(tile: Any) -> Any:
        """Sum the causal keys of earlier tiles. Tile i has query_start + (i + 1) * TILE_QUERIES, as all are full."""
        return tile * query_start + tile * (tile + 1) * (TILE_QUERIES // 2)

    room = room_before(tiles - 1) + query_start + length  # of a sequence; the last tile may not be full
    sequences = torch.arange(batch, device=device)[:, None]
    starts = room_before(torch.arange(tiles, device=device)) + sequences * room
    before = counted.counts_of_pieces.cumsum(-1) - counted.counts_of_pieces
    keys, words = _fill(counted, starts[..., None] + before, batch * room)
    return KeyLists(keys, words, starts, counted.counts, length, counted.host_counts, query_start)


def fill_lists(counted: CountedKeys) -> FilledLists:
    """Wait for the counts, and enqueue the kernels that fill the lists."""
    entries, of_pieces = int(counted.host_counts.read().sum()), counted.counts_of_pieces
    ends = of_pieces.view(-1).cumsum(0, dtype=torch.int64).view(of_pieces.shape)
    starts = ends - of_pieces
    keys, words = _fill(counted, starts, entries)
    return FilledLists(keys, words, starts[..., 0].contiguous(), counted.counts, counted.host_counts)


def _fill(counted: CountedKeys, starts: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and words, int32 [entries]. `starts` int64 [B, tiles, pieces] are the pieces' first entries."""
    packed_mask = counted.packed_mask
    batch, tiles, pieces = starts.shape
    keys = torch.empty(entries, dtype=torch.int32, device=packed_mask.device)
    words = torch.empty_like(keys)
    _fill_kernel[(pieces, tiles, batch)](
        packed_mask,
        starts,
        keys,
        words,
        counted.first_diagonal,
        *packed_mask.shape[1:],
        QUERIES=TILE_QUERIES,
        WORDS=_WORDS,
        num_warps=4,
    )
    return keys, words


def join_lists(filled: list[FilledLists], length: int, query_start: int = 0) -> KeyLists:
    """Concatenate the tiles of a sequence of `length` queries."""
    starts, first = [], 0
    for tiles in filled:
        starts.append(tiles.starts + first)
        first += tiles.keys.numel()
    return KeyLists(
        keys=torch.cat([tiles.keys for tiles in filled]),
        words=torch.cat([tiles.words for tiles in filled]),
        starts=torch.cat(starts, 1),
        counts=torch.cat([tiles.counts for tiles in filled], 1),
        length=length,
        host_counts=HostCounts(torch.cat([tiles.host_counts.read() for tiles in filled], 1)),
        query_start=query_start,
    )


@triton.jit
def _row_words(words_ptr, tile, batch, index, first_diagonal, num_rows, num_words, QUERIES: tl.constexpr):
    """Load the words at `index` of each of the tile's queries, 0 after the tile's last query."""
    in_row = (index < num_words) & (index <= first_diagonal + tile)
    rows = ()
    for r in tl.static_range(QUERIES):
        row = tile * QUERIES + r
        row_ptr = words_ptr + (batch * num_rows + row) * num_words
        rows = rows + (tl.load(row_ptr + index, mask=in_row & (row < num_rows), other=0),)  # type: ignore[assignment] # noqa: RUF005
    return rows


@triton.jit
def _union(rows, QUERIES: tl.constexpr):
    """Return for each word the bits that are set in any row."""
    union = rows[0]
    for r in tl.static_range(1, QUERIES):
        union |= rows[r]
    return union


@triton.jit(do_not_specialize=["first_diagonal", "num_rows", "num_words"])
def _count_kernel(
    words_ptr, counts_ptr, first_diagonal, num_rows, num_words,
    QUERIES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    piece, tile = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    slot = batch * tl.num_programs(1) + tile
    count_ptr = counts_ptr + slot * tl.num_programs(0) + piece
    if piece * WORDS > first_diagonal + tile:  # above the diagonal
        tl.store(count_ptr, 0)
        return
    index = piece * WORDS + tl.arange(0, WORDS)
    rows = _row_words(words_ptr, tile, batch, index, first_diagonal, num_rows, num_words, QUERIES)
    tl.store(count_ptr, tl.sum(count_bits(_union(rows, QUERIES), False)))


@triton.jit(do_not_specialize=["first_diagonal", "num_rows", "num_words"])
def _fill_kernel(
    words_ptr,
    starts_ptr,
    keys_ptr,
    members_ptr,
    first_diagonal,
    num_rows,
    num_words,
    QUERIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    piece, tile = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    if piece * WORDS > first_diagonal + tile:
        return
    index = piece * WORDS + tl.arange(0, WORDS)
    rows = _row_words(words_ptr, tile, batch, index, first_diagonal, num_rows, num_words, QUERIES)
    columns = _turn(rows, QUERIES)
    slot = batch * tl.num_programs(1) + tile
    union = _union(rows, QUERIES)
    sizes = count_bits(union, False)
    place = tl.cumsum(sizes, axis=0) - sizes
    start = tl.load(starts_ptr + slot * tl.num_programs(0) + piece)
    keys_ptr += start
    members_ptr += start
    for bit in tl.static_range(32):
        hit = ((union >> bit) & 1) != 0
        tl.store(keys_ptr + place, index * 32 + bit, mask=hit)
        tl.store(members_ptr + place, columns[bit].to(tl.int32, bitcast=True), mask=hit)
        place += hit.to(tl.int32)


@triton.jit
def _turn(rows, SIZE: tl.constexpr):
    """Transpose 32 x 32 bits elementwise: bit r of result c is bit c of rows[r] (Hacker's Delight, 7-3)."""
    columns = ()
    for r in tl.static_range(SIZE):
        columns = columns + (rows[r].to(tl.uint32, bitcast=True),)  # type: ignore[assignment] # noqa: RUF005
    columns = _swap_blocks(columns, 16, 0x0000FFFF, SIZE)
    columns = _swap_blocks(columns, 8, 0x00FF00FF, SIZE)
    columns = _swap_blocks(columns, 4, 0x0F0F0F0F, SIZE)
    columns = _swap_blocks(columns, 2, 0x33333333, SIZE)
    return _swap_blocks(columns, 1, 0x55555555, SIZE)


@triton.jit
def _swap_blocks(rows, WIDTH: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr):
    """Split the bit matrix into squares of 2 * WIDTH rows and columns. In each square, swap the upper right quarter and
    the lower left quarter. LOW selects the low WIDTH bits of each group of 2 * WIDTH bits."""
    swapped = ()
    for r in tl.static_range(SIZE):
        if r % (2 * WIDTH) < WIDTH:
            mixed = (rows[r] & LOW) | ((rows[r + WIDTH] & LOW) << WIDTH)
        else:
            mixed = ((rows[r - WIDTH] >> WIDTH) & LOW) | (rows[r] & (LOW << WIDTH))
        swapped = swapped + (mixed,)  # type: ignore[assignment] # noqa: RUF005
    return swapped
