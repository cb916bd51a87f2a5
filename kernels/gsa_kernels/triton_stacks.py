"""The heads of a row tile side by side, for one product with the keys of all heads: device code.

In the layout of a product every thread then has all heads of its rows, so that a score needs no exchange between
threads; and a step waits for one product, where head by head it waits for each.
"""

# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def stack_slots(row_index, valid, HI: tl.constexpr, HEADS: tl.constexpr):
    """Where (row, head) is in [B, R, HI], and whether it exists: [HEADS, BM] each, HEADS >= HI a power of two."""
    heads = tl.arange(0, HEADS)
    return row_index[None, :] * HI + heads[:, None], valid[None, :] & (heads < HI)[:, None]


@triton.jit
def stack(x):
    """[HEADS, BM, columns] -> [HEADS * BM, columns], two heads in turn for each eight rows.

    In the layout of a product the rows i and i + 8 of a warp's 16 are of one thread: these are two heads of one row. So
    a thread has all heads of its rows from tiles of 32 rows on.
    """
    heads: tl.constexpr = x.shape[0]
    rows: tl.constexpr = x.shape[1]
    columns: tl.constexpr = x.shape[2]
    pair: tl.constexpr = 2 if heads > 1 else 1
    parts = tl.reshape(x, [heads // pair, pair, rows // 8, 8, columns])
    return tl.reshape(tl.permute(parts, [0, 2, 1, 3, 4]), [heads * rows, columns])


@triton.jit
def unstack(x, HEADS: tl.constexpr):
    """The inverse of `stack`."""
    rows: tl.constexpr = x.shape[0] // HEADS
    columns: tl.constexpr = x.shape[1]
    pair: tl.constexpr = 2 if HEADS > 1 else 1
    parts = tl.reshape(x, [HEADS // pair, rows // 8, pair, 8, columns])
    return tl.reshape(tl.permute(parts, [0, 2, 1, 3, 4]), [HEADS, rows, columns])


@triton.jit
def place_in_stack(head, row, HEADS: tl.constexpr, BM: tl.constexpr):
    """The row of a stack that holds this head."""
    pair: tl.constexpr = 2 if HEADS > 1 else 1
    return head // pair * (pair * BM) + row // 8 * (pair * 8) + head % pair * 8 + row % 8


@triton.jit
def load_stacked_queries(
    q_idx, row_index, valid, HI: tl.constexpr, HEADS: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[HEADS * BM, BLOCK_D], stacked: one product then gives the tiles of all heads."""
    slots, exists = stack_slots(row_index, valid, HI, HEADS)
    slots = tl.reshape(stack(slots[:, :, None]), [HEADS * row_index.shape[0]])
    mask = stack(exists[:, :, None])
    d = tl.arange(0, BLOCK_D)
    if DI != BLOCK_D:
        mask = mask & (d < DI)[None, :]
    return tl.load(q_idx + slots[:, None] * DI + d[None, :], mask=mask, other=0.0)


@triton.jit
def split_stack(x, HEADS: tl.constexpr):
    """[HEADS * BM, columns] -> a tuple of HEADS tiles [BM, columns]. HEADS is 2 or 4."""
    tl.static_assert(HEADS == 2 or HEADS == 4, "of two or four heads")
    rows: tl.constexpr = x.shape[0] // HEADS
    columns: tl.constexpr = x.shape[1]
    parts = tl.permute(tl.reshape(x, [HEADS // 2, rows // 8, 2, 8, columns]), [1, 3, 4, 2, 0])
    if HEADS == 2:
        first, second = tl.split(tl.reshape(parts, [rows, columns, 2]))
        heads = (first, second)
    else:
        low, high = tl.split(tl.reshape(parts, [rows, columns, 2, 2]))
        first, second = tl.split(low)
        third, fourth = tl.split(high)
        heads = (first, second, third, fourth)
    return heads
