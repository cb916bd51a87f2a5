"""Quantizes one or two matrices to FP8 in two launches: one finds the largest magnitudes, the other casts."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_kernel_dtype
from gsa_kernels.devices import interpreted, launching_on
from gsa_kernels.fused.fp8.reference import E4M3, E5M2, SMALLEST, Quantized
from gsa_kernels.limits import FP8_MULTIPLE, ceil_div

PARTS, BLOCK, MAGNITUDE_WARPS = 512, 8192, 8
"""Programs per matrix, a power of 2; and elements that a program takes at a time: four loads of 16 bytes per thread."""

ROWS, COLUMNS, CAST_WARPS = 128, 64, 4
"""Tile of the cast. A column of a tile is 128 contiguous bytes of the transpose."""

WORD = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}.f32 low, $2, $1;
cvt.rn.satfinite.{0}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
"""Casts four numbers and joins them. The PTX that Triton makes of casts and shifts crashes ptxas 12.8."""
FORMATS = {E4M3: "e4m3x2", E5M2: "e5m2x2"}


def fused_magnitudes(*tensors: torch.Tensor) -> torch.Tensor:
    """Implement `magnitudes` of fused/fp8/reference.py for one or two contiguous tensors: int32 [tensors, PARTS]."""
    x, w = tensors[0], tensors[-1]  # of a single tensor, only x's programs run
    for tensor in tensors:
        check_kernel_dtype("x", tensor, "fused/fp8/reference.py")
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor has strides {tensor.stride()}; pass contiguous tensors")
    bits = torch.empty(len(tensors), PARTS, dtype=torch.int32, device=x.device)
    sizes = {"PARTS": PARTS, "BLOCK": BLOCK, "num_warps": MAGNITUDE_WARPS}
    with launching_on(x, "x"):
        _magnitudes_kernel[(bits.numel(),)](x, w, bits, x.numel(), w.numel(), **sizes)
    return bits


def fused_quantize(
    matrices: Sequence[torch.Tensor], bits: torch.Tensor, dtype: torch.dtype, transposes: Sequence[bool]
) -> list[Quantized]:
    """Implement `quantize` of fused/fp8/reference.py, bit for bit, for one or two matrices.

    Args:
        matrices: [M, K], bf16 or fp32, contiguous; M of a transpose is a multiple of FP8_MULTIPLE
        bits: int32 [matrices, a power of 2]
    """
    x, w = matrices[0], matrices[-1]
    found, tiles = [], []
    for each, transposed in zip(matrices, transposes, strict=True):
        count, width = each.shape
        if (transposed and count % FP8_MULTIPLE) or not each.is_contiguous():
            wanted = f"contiguous rows, for a transpose a multiple of {FP8_MULTIPLE}"
            raise ValueError(f"a matrix has shape {(count, width)}, strides {each.stride()}; pass {wanted}")
        rows = torch.empty(count, width, dtype=dtype, device=x.device)
        columns = torch.empty(width, count, dtype=dtype, device=x.device) if transposed else None
        found.append(Quantized(rows, columns, torch.empty((), dtype=torch.float32, device=x.device)))
        tiles.append(ceil_div(count, ROWS) * ceil_div(width, COLUMNS))
    of_x, of_w = (*found[0], *x.shape), (*found[-1], *w.shape)
    word = None if interpreted() else WORD.format(FORMATS[dtype])
    formats = {"LIMIT": torch.finfo(dtype).max, "SMALLEST": SMALLEST, "WORD": word}
    sizes = {"PARTS": bits.shape[1], "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": CAST_WARPS}
    with launching_on(x, "x"):
        _cast_kernel[(sum(tiles),)](x, *of_x, w, *of_w, bits, tiles[0], **formats, **sizes)
    return found


@triton.jit
def _magnitudes_kernel(x, w, bits, x_count, w_count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    if program < PARTS:
        largest = _largest(x, x_count, program, PARTS, BLOCK)
    else:
        largest = _largest(w, w_count, program - PARTS, PARTS, BLOCK)
    tl.store(bits + program, largest)


@triton.jit
def _largest(x, count, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.int32)
    for block in range(part, tl.cdiv(count, BLOCK), PARTS):
        places = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + places, mask=places < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(largest)


@triton.jit
def _cast_kernel(
    x,
    x_rows,
    x_columns,
    x_inverse_scale,
    x_count,
    x_width,
    w,
    w_rows,
    w_columns,
    w_inverse_scale,
    w_count,
    w_width,
    bits,
    x_tiles,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    WORD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # The end was read or written last, and is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if tile < x_tiles:
        scale = _scale(bits, x_inverse_scale, tile, LIMIT, SMALLEST, PARTS)
        _cast(x, x_rows, x_columns, x_count, x_width, scale, tile, WORD, ROWS, COLUMNS)
    else:
        tile -= x_tiles
        scale = _scale(bits + PARTS, w_inverse_scale, tile, LIMIT, SMALLEST, PARTS)
        _cast(w, w_rows, w_columns, w_count, w_width, scale, tile, WORD, ROWS, COLUMNS)


@triton.jit
def _scale(bits, inverse_scale, tile, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, PARTS: tl.constexpr):
    """Return the factor of the values. The first program writes its inverse, which a product multiplies with."""
    magnitude = tl.max(tl.load(bits + tl.arange(0, PARTS))).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude < SMALLEST, SMALLEST, magnitude)  # keeps NaN
    limit = tl.full([], LIMIT, tl.float32)
    if tile == 0:
        tl.store(inverse_scale, tl.div_rn(magnitude, limit))
    return tl.div_rn(limit, magnitude)


@triton.jit
def _cast(x, rows, columns, count, width, scale, tile, WORD, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Cast a tile. For the transpose, four rows at a time form words of 32 bits, which transpose fastest."""
    across = tl.cdiv(width, COLUMNS)
    group = tile // across * (ROWS // 4) + tl.arange(0, ROWS // 4)  # of four rows
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    left, inside = (count - 4 * group)[:, None], (column < width)[None, :]
    places = (4 * group).to(tl.int64)[:, None] * width + column[None, :]
    # All loads come first, so that they overlap. Casts round fp32 once, and to the largest finite number at most.
    a = tl.load(x + places, mask=inside & (left > 0), other=0.0).to(tl.float32) * scale
    b = tl.load(x + places + width, mask=inside & (left > 1), other=0.0).to(tl.float32) * scale
    c = tl.load(x + places + 2 * width, mask=inside & (left > 2), other=0.0).to(tl.float32) * scale
    d = tl.load(x + places + 3 * width, mask=inside & (left > 3), other=0.0).to(tl.float32) * scale
    tl.store(rows + places, a.to(rows.dtype.element_ty), mask=inside & (left > 0))
    tl.store(rows + places + width, b.to(rows.dtype.element_ty), mask=inside & (left > 1))
    tl.store(rows + places + 2 * width, c.to(rows.dtype.element_ty), mask=inside & (left > 2))
    tl.store(rows + places + 3 * width, d.to(rows.dtype.element_ty), mask=inside & (left > 3))
    if columns is not None:
        if WORD is None:
            words = _byte(a, rows) | _byte(b, rows) << 8 | _byte(c, rows) << 16 | _byte(d, rows) << 24
        else:
            words = tl.inline_asm_elementwise(
                WORD, "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1
            )
        groups = tl.multiple_of(count // 4, 4)
        exists = (column < width)[:, None] & (group < groups)[None, :]
        places = column.to(tl.int64)[:, None] * groups + group[None, :]
        columns = columns.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(columns + places, words.trans(), mask=exists)


@triton.jit
def _byte(values, like):
    return values.to(like.dtype.element_ty).to(tl.uint8, bitcast=True).to(tl.int32)
