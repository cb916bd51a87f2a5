"""Stacks the indexer heads of a tile of query rows into one matrix, so that one matrix product computes all heads.

In the register layout of this product each thread holds all heads of its rows, if a tile has at least 32 rows. The sum
over heads therefore needs no exchange between threads.
"""

# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def stack_slots(row_index, valid, HI: tl.constexpr, HEADS: tl.constexpr):
    """Return for each head and row its index in [B, R, HI], and whether both exist: two [HEADS, BM]. HEADS >= HI is a
    power of two."""
    heads = tl.arange(0, HEADS)
    return row_index[None, :] * HI + heads[:, None], valid[None, :] & (heads < HI)[:, None]


@triton.jit
def stack(x):
    """Reshape [HEADS, BM, columns] to [HEADS * BM, columns], alternating two heads every eight rows.

    In the register layout of a product, one thread holds rows i and i + 8 of a warp's 16 rows. In the stack these two
    are one query row of two heads. A thread therefore has all heads of its rows if BM is at least 32.
    """
    heads: tl.constexpr = x.shape[0]
    rows: tl.constexpr = x.shape[1]
    columns: tl.constexpr = x.shape[2]
    pair: tl.constexpr = 2 if heads > 1 else 1
    parts = tl.reshape(x, [heads // pair, pair, rows // 8, 8, columns])
    return tl.reshape(tl.permute(parts, [0, 2, 1, 3, 4]), [heads * rows, columns])


@triton.jit
def unstack(x, HEADS: tl.constexpr):
    """Invert `stack`."""
    rows: tl.constexpr = x.shape[0] // HEADS
    columns: tl.constexpr = x.shape[1]
    pair: tl.constexpr = 2 if HEADS > 1 else 1
    parts = tl.reshape(x, [HEADS // pair, rows // 8, pair, 8, columns])
    return tl.reshape(tl.permute(parts, [0, 2, 1, 3, 4]), [HEADS, rows, columns])


@triton.jit
def place_in_stack(head, row, HEADS: tl.constexpr, BM: tl.constexpr):
    """Return the row of a stack that holds this head."""
    pair: tl.constexpr = 2 if HEADS > 1 else 1
    return head // pair * (pair * BM) + row // 8 * (pair * 8) + head % pair * 8 + row % 8


@triton.jit
def load_stacked_queries(
    q_idx, row_index, valid, HI: tl.constexpr, HEADS: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load stacked queries [HEADS * BM, BLOCK_D]."""
    slots, exists = stack_slots(row_index, valid, HI, HEADS)
    slots = tl.reshape(stack(slots[:, :, None]), [HEADS * row_index.shape[0]])
    mask = stack(exists[:, :, None])
    d = tl.arange(0, BLOCK_D)
    if DI != BLOCK_D:
        mask = mask & (d < DI)[None, :]
    return tl.load(q_idx + slots[:, None] * DI + d[None, :], mask=mask, other=0.0)


@triton.jit
def split_stack(x, HEADS: tl.constexpr):
    """Split [HEADS * BM, columns] into a tuple of HEADS tiles [BM, columns]. HEADS is 2 or 4."""
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
