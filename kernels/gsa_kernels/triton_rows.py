"""Rows of a chunk that may be a sample of the sequence's: see `SampledRows`."""

import triton
import triton.language as tl


@triton.jit
def row_of(number, row_start, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Row of the sequence that is number `number` of a chunk from `row_start` on: stretches of STRETCH rows, SPACING
    apart."""
    if SPACING == STRETCH:  # noqa: SIM108 (known at compile time)
        row = row_start + number
    else:
        row = row_start + number // STRETCH * SPACING + number % STRETCH
    return row


@triton.jit
def rows_of(number, row_start, COUNT: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Rows of the sequence that are the COUNT numbers of a chunk from `number` on, a multiple of COUNT. Stretches are
    whole multiples of COUNT or the other way round."""
    if STRETCH % COUNT == 0:  # neighbours
        rows = row_of(number, row_start, STRETCH, SPACING) + tl.arange(0, COUNT)
    else:
        rows = row_of(number + tl.arange(0, COUNT), row_start, STRETCH, SPACING)
    return rows


@triton.jit
def last_row_of(tile, row_start, num_rows, BM: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Last row of a tile of BM rows; the chunk has num_rows."""
    return row_of(tl.minimum(tile * BM + BM, num_rows) - 1, row_start, STRETCH, SPACING)


@triton.jit
def number_of(row, row_start, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """The number of the chunk's first row at or after `row`, a row at or after `row_start`."""
    number = row - row_start
    if SPACING != STRETCH:
        number = number // SPACING * STRETCH + tl.minimum(number % SPACING, STRETCH)
    return number


@triton.jit
def rows_of_program(
    R,
    query_start,
    row_start,
    num_rows,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
):
    """The tile of BM rows of a program on a grid (anything, tiles, B). The last tiles see most keys and go first.

    Returns:
        tile, b; of each row its number in the chunk, whether it exists, its query's position (-1 if not) and
        b * R + row, int64; the position of the last
    """
    if query_start is None:  # stands for 0: a constant, so that the whole sequence costs nothing more
        query_start = 0
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.program_id(2)
    local = tile * BM + tl.arange(0, BM)
    valid = local < num_rows
    in_sequence = rows_of(tile * BM, row_start, BM, STRETCH, SPACING)
    positions = tl.where(valid, query_start + in_sequence * STRIDE, -1)
    row_index = b.to(tl.int64) * R + in_sequence
    last = query_start + last_row_of(tile, row_start, num_rows, BM, STRETCH, SPACING) * STRIDE
    return tile, b, local, valid, positions, row_index, last
