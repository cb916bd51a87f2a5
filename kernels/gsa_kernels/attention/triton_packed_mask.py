"""Transposes the packed mask: from one bit per key, by query, to one bit per query, by key."""

import torch
import triton
import triton.language as tl

_WORDS = tl.constexpr(8)


def transpose_packed_mask(packed_mask: torch.Tensor, query_start: int = 0) -> torch.Tensor:
    """The same selection for a program that owns keys and walks over queries.

    Args:
        packed_mask: int32 [B, L, ceil(Lk / 32)], Lk = query_start + L: bit s % 32 of [b, i, s // 32] says that query i,
            at position query_start + i, selects s

    Returns:
        int32 [B, ceil(L / 32), Lk]: bit i % 32 of [b, i // 32, s] says that query i selects s
    """
    batch, length, columns = packed_mask.shape
    num_keys, query_blocks = query_start + length, triton.cdiv(length, 32)
    turned = torch.empty(batch, query_blocks, num_keys, dtype=torch.int32, device=packed_mask.device)
    grid = (triton.cdiv(columns, _WORDS.value), query_blocks, batch)
    first_diagonal = (query_start + 31) // 32
    _transpose_kernel[grid](
        packed_mask, turned, *packed_mask.stride()[:2], length, num_keys, columns, first_diagonal, num_warps=4
    )
    return turned


@triton.jit
def _transpose_kernel(
    packed_mask, turned, stride_wb, stride_wl, length, num_keys, columns, first_diagonal
):  # fmt: skip
    """32 queries by 8 words: 256 keys, each with one word at the end. The last query of block i has its own key in
    word i + first_diagonal."""
    query_block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    bit = tl.arange(0, 32)
    row = query_block * 32 + bit
    keys = tl.program_id(0) * _WORDS * 32 + tl.arange(0, _WORDS * 32)
    result = tl.zeros([_WORDS * 32], tl.int32)
    # Keys after all of the queries are selected by none of them: not read, but written.
    if tl.program_id(0) * _WORDS <= query_block + first_diagonal:
        pointers = packed_mask + batch * stride_wb + row.to(tl.int64)[:, None] * stride_wl + column[None, :]
        tile = tl.load(pointers, mask=(row < length)[:, None] & (column < columns)[None, :], other=0)
        chosen = (tile[:, :, None] >> bit[None, None, :]) & 1
        # Distinct bits: their sum is their union, and bit 31 comes out as the sign.
        result = tl.reshape(tl.sum(chosen << bit[:, None, None], 0), [_WORDS * 32])
    target = turned + (batch * tl.num_programs(1) + query_block) * num_keys + keys
    tl.store(target, result, mask=keys < num_keys)
