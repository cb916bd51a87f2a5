"""Selection words turned round: from one bit per key, by query, to one bit per query, by key."""

import torch
import triton
import triton.language as tl

_WORDS = tl.constexpr(8)


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    """The same selection for a program that owns keys and walks over queries.

    Args:
        words: int32 [B, L, ceil(L / 32)], bit s % 32 of [b, t, s // 32] says that t selects s

    Returns:
        int32 [B, ceil(L / 32), L]: bit t % 32 of [b, t // 32, s] says that t selects s
    """
    batch, length, columns = words.shape
    turned = torch.empty(batch, columns, length, dtype=torch.int32, device=words.device)
    grid = (triton.cdiv(columns, _WORDS.value), columns, batch)
    _transpose_kernel[grid](words, turned, *words.stride()[:2], length, columns, num_warps=4)
    return turned


@triton.jit
def _transpose_kernel(words, turned, stride_wb, stride_wl, length, columns):
    """32 queries by 8 words: 256 keys, each with one word at the end."""
    query_block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    bit = tl.arange(0, 32)
    row = query_block * 32 + bit
    keys = tl.program_id(0) * _WORDS * 32 + tl.arange(0, _WORDS * 32)
    result = tl.zeros([_WORDS * 32], tl.int32)
    # Keys after all of the queries are selected by none of them: not read, but written.
    if tl.program_id(0) * _WORDS <= query_block:
        pointers = words + batch * stride_wb + row.to(tl.int64)[:, None] * stride_wl + column[None, :]
        tile = tl.load(pointers, mask=(row < length)[:, None] & (column < columns)[None, :], other=0)
        chosen = (tile[:, :, None] >> bit[None, None, :]) & 1
        # Distinct bits: their sum is their union, and bit 31 comes out as the sign.
        result = tl.reshape(tl.sum(chosen << bit[:, None, None], 0), [_WORDS * 32])
    target = turned + (batch * columns + query_block) * length + keys
    tl.store(target, result, mask=keys < length)
