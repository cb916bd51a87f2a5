"""Sums the queries' targets over each block of queries and over the parts of the heads (target_blocks.py). The sums are
the target of the loss if a block shares one selection."""

import torch
import triton
import triton.language as tl

from gsa_kernels.hopper.target_blocks import BLOCK
from gsa_kernels.limits import ceil_div
from gsa_kernels.types import Geometry

_TILES = 4
"""Blocks of keys per program: 8 KiB of each part and 32 queries, in one piece."""
_WRITTEN = tl.constexpr(64)
"""Keys whose target is written together, starting with the tile of the first causal key of 32 queries."""


def sum_over_query_blocks(
    target: torch.Tensor, queries: range, num_keys: int, geometry: Geometry
) -> torch.Tensor:
    """Return the target of the loss of a shared selection.

    Args:
        target: fp16 [B, parts, row blocks, key blocks, 1024], of `queries`, from `backward_queries_with_target`
        queries: from the first query of a block to the last query of a block or of the sequence

    Returns:
        fp32 [B, blocks of `queries`, Lk]; 0 at keys that are not causal for the block's first query
    """
    batch, parts = target.shape[:2]
    block, starts = geometry.selection_block, geometry.document_starts
    rows = ceil_div(len(queries), block)
    of_program = max(BLOCK.value // block, 1)
    out = torch.empty((batch, rows, num_keys), dtype=torch.float32, device=target.device)
    grid = (ceil_div(num_keys, _TILES * BLOCK.value), ceil_div(rows, of_program), batch)
    _sum_kernel[grid](
        target,
        starts,
        out,
        *target.stride()[:3],
        0 if starts is None else starts.stride(0),
        queries.start,
        len(queries),
        rows,
        num_keys,
        target.shape[3],
        geometry.query_start,
        PARTS=parts,
        SHARING=block,
        ROWS=of_program,
        ROW_BLOCKS=ceil_div(block, BLOCK.value),
        TILES=_TILES,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["first_query", "num_queries", "num_rows", "query_start"])
def _sum_kernel(
    target,  # [B, PARTS, row blocks, key blocks, 1024] fp16
    document_starts,  # [B, L] int32, or None
    out,  # [B, rows, Lk] fp32
    stride_b,
    stride_part,
    stride_row,
    stride_starts,
    first_query,
    num_queries,
    num_rows,
    num_keys,
    key_blocks,
    query_start,
    PARTS: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program sums TILES blocks of keys for ROWS rows of 32 queries, or one row of ROW_BLOCKS times 32. Grid:
    (keys, rows, B)."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    key_block = tl.program_id(0) * TILES
    size: tl.constexpr = BLOCK * BLOCK
    tile = key_block + tl.arange(0, TILES)
    places = tl.arange(0, TILES)[:, None] * size + tl.arange(0, size)[None, :]
    # This is the position of the last row's first query. Later keys are in no row's target.
    last_leader = query_start + first_query + (first_row + ROWS - 1) * SHARING
    total = tl.zeros([TILES, size], tl.float32)
    target += batch * stride_b + key_block.to(tl.int64) * size
    for number in tl.static_range(ROW_BLOCKS):
        row_block = first_row * SHARING // BLOCK + number
        first = first_query + row_block * BLOCK
        if row_block * BLOCK < num_queries:
            written_from = 0
            if document_starts is not None:
                start = tl.load(document_starts + batch * stride_starts + first)
                written_from = start // _WRITTEN * _WRITTEN
            written = (tile * BLOCK >= written_from) & (tile * BLOCK <= last_leader) & (tile < key_blocks)
            for part in range(PARTS):
                at = target + part * stride_part + row_block.to(tl.int64) * stride_row
                total += tl.load(at + places, mask=written[:, None], other=0.0).to(tl.float32)

    # A block orders the keys of a row by lane, group of eight and pair.
    parts = tl.reshape(total, [TILES, ROWS, BLOCK // ROWS, 4, 4, 2])
    sums = tl.permute(tl.sum(parts, 2), [1, 0, 3, 2, 4])
    sums = tl.reshape(sums, [ROWS, TILES * BLOCK])
    rows = first_row + tl.arange(0, ROWS)
    keys = key_block * BLOCK + tl.arange(0, TILES * BLOCK)
    leaders = query_start + first_query + rows * SHARING
    sums = tl.where(keys[None, :] <= leaders[:, None], sums, 0.0)
    tl.store(
        out + (batch * num_rows + rows)[:, None] * num_keys + keys[None, :],
        sums,
        mask=(rows < num_rows)[:, None] & (keys < num_keys)[None, :],
    )
