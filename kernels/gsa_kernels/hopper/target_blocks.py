"""Stores the target of the indexer loss in blocks of 32 queries by 32 keys, in the order of the registers.

In the layout of a product a warp has eight rows, four lanes to each, and a lane the columns 2 lane, 2 lane + 1, and
those 8, 16 and 24 further. A block has these eight values side by side: 16 bytes that a thread stores, and a thread
loads. From rows of keys the loss would read them through shared memory, eight lanes in one bank (docs/kernels.md,
Tuning).
"""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
"""Queries and keys."""

KEY = tl.constexpr(32)
"""Elements from one block of keys to the next, for each key."""


def block_shape(rows: int, keys: int) -> tuple[int, int, int]:
    """(row blocks, key blocks, 1024), even numbers: kernels take up to two blocks each way at a time, and mask none."""
    size: int = BLOCK.value
    return 2 * triton.cdiv(rows, 2 * size), 2 * triton.cdiv(keys, 2 * size), size * size


def empty_blocks(batch: int, parts: int, rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Uninitialised fp16 [batch, parts, row blocks, key blocks, 1024]."""
    return torch.empty((batch, parts, *block_shape(rows, keys)), dtype=torch.float16, device=device)


def rows_of_blocks(blocks: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """[batch, parts, row blocks, key blocks, 1024] -> [batch, parts, rows, keys]."""
    eights, row, lane, group, pair = range(4, 9)
    apart = blocks.unflatten(-1, (4, 8, 4, 4, 2))
    whole = apart.permute(0, 1, 2, eights, row, 3, group, lane, pair)
    return whole.flatten(5).flatten(2, 4)[:, :, :rows, :keys]


@triton.jit
def place_in_block(row, lane):
    """Offset of the first of a lane's eight values in a row of the block."""
    return row * 32 + lane * 8


@triton.jit
def block_places(ROWS: tl.constexpr, KEYS: tl.constexpr, row_stride):
    """[ROWS / 32, 32 KEYS]: all elements of a tile, in the order of memory."""
    tl.static_assert(
        ROWS // BLOCK * BLOCK == ROWS and KEYS // BLOCK * BLOCK == KEYS, "a tile has whole blocks"
    )
    return tl.arange(0, ROWS // BLOCK)[:, None] * row_stride + tl.arange(0, BLOCK * KEYS)[None, :]


@triton.jit
def tile_of_blocks(values, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """What is at `block_places` -> [ROWS, KEYS]."""
    parts = tl.reshape(values, [ROWS // BLOCK, KEYS // BLOCK, 4, 8, 4, 4, 2])
    return tl.reshape(tl.permute(parts, [0, 2, 3, 1, 5, 4, 6]), [ROWS, KEYS])
