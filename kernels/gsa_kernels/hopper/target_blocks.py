"""Stores the target of the indexer loss in blocks of 32 queries by 32 keys, so that a thread loads 16 bytes at once.

In the register layout of a matrix product, a warp covers eight rows, with four lanes per row. Lane i of a row holds
eight columns: 2i and 2i + 1, and these two columns shifted by 8, 16 and 24. A block stores these eight fp16 values side
by side. If the target were row-major, the loss kernel would have to read it through shared memory, where eight lanes
would use one bank (docs/kernels.md, Tuning).
"""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
"""Number of queries of a block, and of keys."""

KEY = tl.constexpr(32)
"""Elements of a block per key. A block that begins at key s of its row of blocks has the offset s * KEY."""


def block_shape(rows: int, keys: int) -> tuple[int, int, int]:
    """Return (row blocks, key blocks, 1024). The numbers are even, because kernels take up to two blocks unmasked."""
    size: int = BLOCK.value
    return 2 * triton.cdiv(rows, 2 * size), 2 * triton.cdiv(keys, 2 * size), size * size


def empty_blocks(batch: int, parts: int, rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised fp16 [batch, parts, row blocks, key blocks, 1024]."""
    return torch.empty((batch, parts, *block_shape(rows, keys)), dtype=torch.float16, device=device)


@triton.jit
def place_in_block(row, lane):
    """Return the offset of the first of a lane's eight values in a row of the block."""
    return row * 32 + lane * 8


@triton.jit
def block_places(ROWS: tl.constexpr, KEYS: tl.constexpr, row_stride):
    """Return the places of all elements of a tile in the order of memory: [ROWS / 32, 32 KEYS]."""
    tl.static_assert(
        ROWS // BLOCK * BLOCK == ROWS and KEYS // BLOCK * BLOCK == KEYS, "a tile has whole blocks"
    )
    return tl.arange(0, ROWS // BLOCK)[:, None] * row_stride + tl.arange(0, BLOCK * KEYS)[None, :]


@triton.jit
def tile_of_blocks(values, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Reorder the values at `block_places` to [ROWS, KEYS]."""
    parts = tl.reshape(values, [ROWS // BLOCK, KEYS // BLOCK, 4, 8, 4, 4, 2])
    return tl.reshape(tl.permute(parts, [0, 2, 3, 1, 5, 4, 6]), [ROWS, KEYS])
