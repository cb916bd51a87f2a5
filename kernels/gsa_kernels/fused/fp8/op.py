"""Quantizes to FP8 in one kernel, which writes one or both layouts."""

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_kernel_dtype, check_shape
from gsa_kernels.devices import launching_on
from gsa_kernels.fused.fp8.reference import SMALLEST, Quantized

ROWS, COLUMNS, WARPS = 128, 64, 4
"""Tile. In the transpose, a column of a tile is 128 contiguous bytes."""


def fused_quantize(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, layouts: str) -> Quantized:
    """Implement `quantize` of fused/fp8/reference.py with equal values. A zero may have the other sign.

    Args:
        x: [M, K], bf16 or fp32; copied if not contiguous
        amax: fp32, 0-d
    """
    check_shape("x", x, "[M, K]", (None, None))
    check_shape("amax", amax, "0-d", ())
    check_kernel_dtype("x", x, "fused/fp8/reference.py")
    count, width = x.shape
    unit = torch.empty((), dtype=torch.float32, device=x.device)
    rows = torch.empty(count, width, dtype=dtype, device=x.device) if layouts != "columns" else None
    columns = torch.empty(width, count, dtype=dtype, device=x.device) if layouts != "rows" else None
    with launching_on(x, "x"):
        _quantize_kernel[(triton.cdiv(count, ROWS) * triton.cdiv(width, COLUMNS),)](
            x.contiguous(),
            amax,
            rows,
            columns,
            unit,
            count,
            width,
            LIMIT=torch.finfo(dtype).max,
            LOWEST=torch.finfo(dtype).smallest_normal,
            ANCHOR=1.5 * 2.0**23 * torch.finfo(dtype).eps,
            SMALLEST=SMALLEST,
            TO_ROWS=rows is not None,
            TO_COLUMNS=columns is not None,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return Quantized(rows, columns, unit)


@triton.jit
def _quantize_kernel(
    x,
    amax,
    by_rows,
    by_columns,
    unit,
    count,
    width,
    LIMIT: tl.constexpr,
    LOWEST: tl.constexpr,
    ANCHOR: tl.constexpr,
    SMALLEST: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    row = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    exists = (row < count) & (column < width)
    magnitude = tl.load(amax)
    # Both bounds keep NaN, as torch does.
    magnitude = tl.where(magnitude < SMALLEST, SMALLEST, magnitude)
    values = tl.load(x + row * width + column, mask=exists, other=0.0).to(tl.float32)
    values *= tl.div_rn(tl.full([], LIMIT, tl.float32), magnitude)
    values = tl.where(values > LIMIT, LIMIT, tl.where(values < -LIMIT, -LIMIT, values))
    # Triton casts by way of fp16, and rounds twice. Here a sum rounds to the format's grid, so that the cast is exact:
    # the anchor's last bit is the value's last bit in FP8.
    exponent = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(exponent, LOWEST) * ANCHOR
    values = (values + anchor) - anchor
    if TO_ROWS:
        tl.store(by_rows + row * width + column, values.to(by_rows.dtype.element_ty), mask=exists)
    if TO_COLUMNS:
        tl.store(by_columns + column * count + row, values.to(by_columns.dtype.element_ty), mask=exists)
    if tile == 0:
        tl.store(unit, tl.div_rn(magnitude, tl.full([], LIMIT, tl.float32)))
