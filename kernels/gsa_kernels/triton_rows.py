"""Maps the rows of a chunk (`SampledRows`) to rows of the sequence."""

import triton
import triton.language as tl


@triton.jit
def row_of(number, row_start, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Map the number of a row within a chunk to the number of this row in the sequence.

    The chunk consists of stretches of STRETCH rows. The first stretch starts at `row_start`, and each further stretch
    starts SPACING rows after the previous start.
    """
    if SPACING == STRETCH:  # noqa: SIM108 (known at compile time)
        row = row_start + number
    else:
        row = row_start + number // STRETCH * SPACING + number % STRETCH
    return row


@triton.jit
def rows_of(number, row_start, COUNT: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Map rows `number` to `number + COUNT - 1` of the chunk to their numbers in the sequence.

    `number` is a multiple of COUNT. STRETCH is a multiple of COUNT, or COUNT is a multiple of STRETCH.
    """
    if STRETCH % COUNT == 0:  # neighbours
        rows = row_of(number, row_start, STRETCH, SPACING) + tl.arange(0, COUNT)
    else:
        rows = row_of(number + tl.arange(0, COUNT), row_start, STRETCH, SPACING)
    return rows


@triton.jit
def last_row_of(tile, row_start, num_rows, BM: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Return the last row of a tile of BM rows in a chunk of num_rows rows."""
    return row_of(tl.minimum(tile * BM + BM, num_rows) - 1, row_start, STRETCH, SPACING)


@triton.jit
def number_of(row, row_start, STRETCH: tl.constexpr, SPACING: tl.constexpr):
    """Find the chunk's first row that is at or after `row` in the sequence, and return its number within the chunk.

    `row` is at least `row_start`.
    """
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
    BM: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
):
    """Return the tile of BM rows of a program on a grid (anything, tiles, B).

    The last tiles run first, because they have the most keys.

    Returns:
        - tile and b
        - for each row: its number in the chunk, whether it exists, the position of its query (-1 if it does not exist),
          and b * R + row (int64)
        - the position of the last row
    """
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.program_id(2)
    local = tile * BM + tl.arange(0, BM)
    valid = local < num_rows
    in_sequence = rows_of(tile * BM, row_start, BM, STRETCH, SPACING)
    positions = tl.where(valid, query_start + in_sequence, -1)
    row_index = b.to(tl.int64) * R + in_sequence
    last = query_start + last_row_of(tile, row_start, num_rows, BM, STRETCH, SPACING)
    return tile, b, local, valid, positions, row_index, last
