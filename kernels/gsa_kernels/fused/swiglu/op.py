"""Computes SwiGLU by one kernel forward and one backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype
from gsa_kernels.fused.fp8.reference import attached
from gsa_kernels.limits import ceil_div

# Measured on an H200 with [16384, 2 * 5504] in bf16.
ROWS, COLUMNS, WARPS = 4, 512, 4


def fused_swiglu(x: torch.Tensor, for_fp8: bool = False) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension. `swiglu` defines the result.

    Args:
        x: [..., 2F], contiguous; bf16 or fp32
        for_fp8: attach the largest magnitudes of the result and of x's gradient (fused/fp8/reference.py).

    Returns:
        [..., F]
    """
    if x.dim() == 0 or x.shape[-1] % 2 != 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; pass two halves in the last dimension")
    check_kernel_dtype("x", x, "fused/swiglu/reference.py")
    return _SwiGLU.apply(x.contiguous(), for_fp8)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, for_fp8: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.for_fp8 = for_fp8
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if out.numel():
            rows, columns = out.numel() // out.shape[-1], out.shape[-1]
            grid = _grid(rows, columns)
            largest = attached(out, grid[0]) if for_fp8 else None
            _swiglu_kernel[grid](x, out, largest, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        check_differentiated_once()
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if grad.numel():
            rows, columns = grad.numel() // grad.shape[-1], grad.shape[-1]
            grid = _grid(rows, columns)
            largest = attached(grad_x, grid[0]) if ctx.for_fp8 else None
            grad = grad.contiguous()
            _swiglu_backward_kernel[grid](
                x, grad, grad_x, largest, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
            )
        return grad_x, None


def _grid(rows: int, columns: int) -> tuple[int]:
    """Put all programs on the first axis of the grid, because the other axes are limited to 65535 programs."""
    return (ceil_div(columns, COLUMNS) * ceil_div(rows, ROWS),)


@triton.jit
def _halves(rows_total, columns_total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return offsets in an [N, F] and in an [N, 2F] tensor, and which of them exist."""
    across = tl.cdiv(columns_total, COLUMNS)
    rows = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows < rows_total) & (columns < columns_total)
    return rows * columns_total + columns, rows * (2 * columns_total) + columns, mask


@triton.jit
def _swiglu_kernel(x, out, largest, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    narrow, wide, mask = _halves(rows, columns, ROWS, COLUMNS)
    gate = tl.load(x + wide, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + wide + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(out + narrow, result.to(out.dtype.element_ty), mask=mask)
    if largest is not None:
        _store_largest(largest, _magnitudes(result), out)


@triton.jit
def _swiglu_backward_kernel(
    x, grad, grad_x, largest, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    narrow, wide, mask = _halves(rows, columns, ROWS, COLUMNS)
    gate = tl.load(x + wide, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + wide + columns, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad + narrow, mask=mask, other=0.0).to(tl.float32)
    opening = tl.sigmoid(gate)
    # d silu = sigmoid + x sigmoid (1 - sigmoid); 1 - sigmoid(x) = sigmoid(-x) does not cancel
    by_gate = upstream * value * (opening + gate * opening * tl.sigmoid(-gate))
    by_value = upstream * gate * opening
    tl.store(grad_x + wide, by_gate.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_x + wide + columns, by_value.to(grad_x.dtype.element_ty), mask=mask)
    if largest is not None:
        _store_largest(largest, tl.maximum(_magnitudes(by_gate), _magnitudes(by_value)), grad_x)


@triton.jit
def _magnitudes(values):
    """Return the bits of magnitudes, whose maximum as integers keeps NaN."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _store_largest(largest, bits, like):
    """Round only the maximum. Rounding keeps the order, so that it is the largest rounded magnitude."""
    magnitude = tl.max(bits).to(tl.float32, bitcast=True).to(like.dtype.element_ty)
    tl.store(largest + tl.program_id(0), magnitude.to(tl.float32))
