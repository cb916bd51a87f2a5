"""Expands selected groups of keys to the packed mask of their keys."""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import ceil_div

_ROWS, _WORDS = 8, 128  # per program


def packed_keys_of_groups(group_mask: torch.Tensor, pool: int, rows: range) -> torch.Tensor:
    """Return the keys of the groups that each query selected, and the keys of its own group up to itself.

    Args:
        group_mask: int32 [B p, C, ceil(C / 32)], in the order of `groups.py`: query t = p (i + 1) + j of sequence b has
            row i of sequence b p + j
        pool: p, one of limits.KEY_POOLS above 1
        rows: some of the L = p (C + 1) queries

    Returns:
        int32 [B, len(rows), ceil(rows.stop / 32)]
    """
    sequences, num_groups, group_words = group_mask.shape
    num_words = ceil_div(rows.stop, 32)
    out = torch.empty((sequences // pool, len(rows), num_words), dtype=torch.int32, device=group_mask.device)
    grid = (ceil_div(len(rows), _ROWS), ceil_div(num_words, _WORDS), len(out))
    _keys_of_groups_kernel[grid](
        group_mask,
        out,
        rows.start,
        len(rows),
        num_groups,
        num_words,
        group_words,
        POOL=pool,
        ROWS=_ROWS,
        WORDS=_WORDS,
        num_warps=4,
    )
    return out


@triton.jit
def _doubled(bits):
    """Duplicate each of the lower 16 bits: bit i becomes bits 2 i and 2 i + 1."""
    bits = (bits | (bits << 8)) & 0x00FF00FF
    bits = (bits | (bits << 4)) & 0x0F0F0F0F
    bits = (bits | (bits << 2)) & 0x33333333
    bits = (bits | (bits << 1)) & 0x55555555
    return bits | (bits << 1)


@triton.jit(do_not_specialize=["row_start"])
def _keys_of_groups_kernel(
    group_mask, out, row_start, num_rows, num_groups, num_words, group_words,
    POOL: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program expands a tile of words. Grid: (row tiles, word tiles, B). Word w has the keys of 32 / POOL groups,
    which are part of word w / POOL of the groups."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    batch = tl.program_id(2).to(tl.int64)
    query = row_start + number
    row = query // POOL - 1
    valid = (number < num_rows)[:, None] & (word < num_words)[None, :]
    # Queries of the first group have no row.
    chosen = valid & (row >= 0)[:, None] & (word // POOL < group_words)[None, :]
    of_rows = ((batch * POOL + query % POOL) * num_groups + row) * group_words
    groups = tl.load(group_mask + of_rows[:, None] + (word // POOL)[None, :], mask=chosen, other=0)
    keys = groups >> (word % POOL * (32 // POOL))[None, :]
    keys = keys & ((1 << (32 // POOL)) - 1)
    size: tl.constexpr = POOL
    if size >= 2:
        keys = _doubled(keys)
    if size >= 4:
        keys = _doubled(keys)
    if size >= 8:
        keys = _doubled(keys)
    if size >= 16:
        keys = _doubled(keys)
    if size >= 32:
        keys = _doubled(keys)
    # A group lies within one word. The query's own group counts from its first key to the query.
    own = (-1 << (query % 32 // POOL * POOL)) & ~(-2 << (query % 32))
    keys = tl.where(word[None, :] == (query // 32)[:, None], keys | own[:, None], keys)
    tl.store(out + (batch * num_rows + number)[:, None] * num_words + word[None, :], keys, mask=valid)
