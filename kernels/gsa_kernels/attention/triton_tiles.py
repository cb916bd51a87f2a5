"""Loads tiles, expands packed masks and chooses tile shapes for the attention kernels.

A packed mask is an int32 tensor [B, L, ceil(Lk / 32)]. Bit s % 32 of word s // 32 in row i says that query i selects
key s. The queries are the last L of the Lk positions. In names, `rows` and `length` refer to queries, and `positions`
and `num_keys` to keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gsa_kernels.devices import interpreted, properties

# MASKED is the logit of a masked key. It is finite, so that inf - inf never appears. The running maximum of a row
# starts at FLOOR, which is above MASKED. Masked keys before a row's first selected key thus have probability 0.
MASKED = tl.constexpr(-1.0e30)
FLOOR = tl.constexpr(-1.0e20)


class Tiles(NamedTuple):
    """Holds the tile shape and launch options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = True
    """Whether to load tiles by TMA where strides and alignment allow it."""

    registers: int | None = None
    """Largest number of registers of a thread, set if two programs must share a multiprocessor."""


def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 for an interpreted device."""
    return int(properties(device).multi_processor_count) if device.type == "cuda" else 1


def float_warps(head_size: int) -> int:
    """Return the number of warps for an fp32 tile of 32 queries and 32 keys. With heads of size 256, the tile does not
    fit the registers of four warps."""
    return 8 if head_size > 128 else 4


def input_precision(dtype: torch.dtype) -> str:
    """Return the precision of products, exact for fp32. For bf16 and fp16 it has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


def is_even(num_queries: int, num_keys: int, tile: int) -> bool:
    """Return whether tiles divide both the queries and the keys."""
    return num_queries % tile == 0 and num_keys % tile == 0


def use_tma(tiles: Tiles, *tensors: torch.Tensor) -> bool:
    """Return whether the kernel loads tiles by TMA, which needs Hopper and 16-byte aligned bases and strides."""
    if not tiles.tma:
        return False
    if not interpreted() and properties(tensors[0].device).major < 9:
        return False
    return all(
        t.data_ptr() % 16 == 0 and all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in tensors
    )


def tile_source(tensor: torch.Tensor, rows: int, tma: bool) -> torch.Tensor | TensorDescriptor:
    """Return the kernel argument for a [B, L, H, D] tensor that the kernel reads in tiles [rows, D]."""
    return TensorDescriptor.from_tensor(tensor, [1, rows, 1, tensor.shape[-1]]) if tma else tensor


@triton.jit
def load_rows(
    source,
    batch,
    head,
    start,
    stride_b,
    stride_l,
    stride_h,
    length,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load rows [ROWS, D] of one head from start on. Rows beyond the length are 0."""
    if TMA:
        return source.load([batch, start, head, 0]).reshape([ROWS, D])
    else:  # noqa: RET505 (the compiler reads what follows a return)
        # The 64-bit part is a scalar. The offsets within the tile fit 32 bits and are computed once.
        base = source + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
        base += tl.cast(start, tl.int64) * stride_l
        rows = tl.arange(0, ROWS)
        pointers = base + (rows[:, None] * stride_l + tl.arange(0, D)[None, :])
        if EVEN:
            return tl.load(pointers)
        else:  # noqa: RET505
            return tl.load(pointers, mask=(start + rows)[:, None] < length, other=0.0)


@triton.jit
def load_words(pointers, step, valid, left, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load the WIDTH / 32 words of each row of a tile into four vectors [ROWS].

    There are always four vectors. If a row has fewer words, the unused vectors are copies of the first. A vector has
    fewer elements than the program has threads, so the compiler loads it directly into the logits' register layout,
    without shared memory. Four vectors are therefore faster than one tile [ROWS, words].

    Args:
        pointers: [ROWS], to the first word of each row; the next word is `step` elements further
        valid: bool [ROWS], the rows to read if not EVEN
        left: number of words to the end of the rows
    """
    word0 = _load_word(pointers, valid & (left > 0), EVEN)
    word1, word2, word3 = word0, word0, word0
    if WIDTH >= 64:
        word1 = _load_word(pointers + step, valid & (left > 1), EVEN)
    if WIDTH >= 128:
        word2 = _load_word(pointers + 2 * step, valid & (left > 2), EVEN)
        word3 = _load_word(pointers + 3 * step, valid & (left > 3), EVEN)
    return word0, word1, word2, word3


@triton.jit
def _load_word(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:  # noqa: RET505 (the compiler reads what follows a return)
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def expand_words(word0, word1, word2, word3, WIDTH: tl.constexpr):
    """Expand the WIDTH / 32 words of each row to bool [ROWS, WIDTH]: column c is bit c % 32 of the row's word c // 32.

    The shift by c % 32 is split into a shift by c & 6 and a shift by c & 25. In the register layout of a matrix
    product, c & 6 depends on the thread's lane, so the first shift needs an instruction. c & 25 depends
    only on the register, so the compiler replaces the second shift with a test of a fixed bit.
    """
    columns = tl.arange(0, WIDTH)
    of_lane = (columns & 6)[None, :]
    of_register = (columns & 25)[None, :]
    bits = (word0[:, None] >> of_lane) >> of_register
    if WIDTH >= 64:
        bits = tl.where((columns & 32)[None, :] != 0, (word1[:, None] >> of_lane) >> of_register, bits)
    if WIDTH >= 128:
        high = tl.where(
            (columns & 32)[None, :] != 0,
            (word3[:, None] >> of_lane) >> of_register,
            (word2[:, None] >> of_lane) >> of_register,
        )
        bits = tl.where((columns & 64)[None, :] != 0, high, bits)
    return (bits & 1) != 0


@triton.jit
def causal_hit(rows, columns, first_keys, HAS_DOCUMENTS: tl.constexpr):
    """Return bool [ROWS, COLUMNS] of dense attention: first_keys[row] <= column <= row, in positions."""
    hit = columns[None, :] <= rows[:, None]
    if HAS_DOCUMENTS:
        hit = hit & (columns[None, :] >= first_keys[:, None])
    return hit
