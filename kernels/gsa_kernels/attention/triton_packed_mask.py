"""Transposes the packed mask. The input has a row per query, with a bit per key. The result has a row per key, with a
bit per query."""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import ceil_div

_WORDS = tl.constexpr(8)


def transpose_packed_mask(packed_mask: torch.Tensor, query_start: int = 0) -> torch.Tensor:
    """Return the same selection for programs that own keys and loop over queries.

    Args:
        packed_mask: int32 [B, L, ceil(Lk / 32)], Lk = query_start + L: bit s % 32 of [b, i, s // 32] says that query i,
            at position query_start + i, selects s

    Returns:
        int32 [B, ceil(L / 32), Lk]: bit i % 32 of [b, i // 32, s] says that query i selects s
    """
    batch, length, columns = packed_mask.shape
    num_keys, query_blocks = query_start + length, ceil_div(length, 32)
    turned = torch.empty(batch, query_blocks, num_keys, dtype=torch.int32, device=packed_mask.device)
    grid = (ceil_div(columns, _WORDS.value), query_blocks, batch)
    first_diagonal = (query_start + 31) // 32
    _transpose_kernel[grid](
        packed_mask, turned, *packed_mask.stride()[:2], length, num_keys, columns, first_diagonal, num_warps=4
    )
    return turned


@triton.jit
def _transpose_kernel(
    packed_mask, turned, stride_wb, stride_wl, length, num_keys, columns, first_diagonal
):  # fmt: skip
    """Each program transposes the bits of 32 queries and 256 keys: 8 words per query in `packed_mask` become one word
    per key in `turned`.

    Block i has queries 32 i to 32 i + 31. The bit for the last query's own position is in the word with index
    i + first_diagonal. Attention is causal, so later words have no bits set and need not be read.
    """
    query_block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    bit = tl.arange(0, 32)
    row = query_block * 32 + bit
    keys = tl.program_id(0) * _WORDS * 32 + tl.arange(0, _WORDS * 32)
    result = tl.zeros([_WORDS * 32], tl.int32)
    # Otherwise all these keys come after the queries of the block, and the result is 0.
    if tl.program_id(0) * _WORDS <= query_block + first_diagonal:
        pointers = packed_mask + batch * stride_wb + row.to(tl.int64)[:, None] * stride_wl + column[None, :]
        tile = tl.load(pointers, mask=(row < length)[:, None] & (column < columns)[None, :], other=0)
        chosen = (tile[:, :, None] >> bit[None, None, :]) & 1
        # The bits are distinct, so their sum is their union. Bit 31 becomes the sign.
        result = tl.reshape(tl.sum(chosen << bit[:, None, None], 0), [_WORDS * 32])
    target = turned + (batch * tl.num_programs(1) + query_block) * num_keys + keys
    tl.store(target, result, mask=keys < num_keys)
