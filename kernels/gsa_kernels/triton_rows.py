"""Rows of a chunk that may be a sample of the sequence's: see `RowSample`."""

import triton
import triton.language as tl


@triton.jit
def row_of(number, row_start, RUN: tl.constexpr, SPACING: tl.constexpr):
    """Row of the sequence that is number `number` of a chunk from `row_start` on: runs of RUN rows, SPACING apart."""
    if SPACING == RUN:  # noqa: SIM108 (known at compile time)
        row = row_start + number
    else:
        row = row_start + number // RUN * SPACING + number % RUN
    return row


@triton.jit
def last_row_of(tile, row_start, num_rows, BM: tl.constexpr, RUN: tl.constexpr, SPACING: tl.constexpr):
    """Last row of a tile of BM rows, of which RUN is a multiple; the chunk has num_rows."""
    return row_of(tl.minimum(tile * BM + BM, num_rows) - 1, row_start, RUN, SPACING)


@triton.jit
def number_of(row, row_start, RUN: tl.constexpr, SPACING: tl.constexpr):
    """The number of the chunk's first row at or after `row`, a row at or after `row_start`."""
    number = row - row_start
    if SPACING != RUN:
        number = number // SPACING * RUN + tl.minimum(number % SPACING, RUN)
    return number
