"""Computes RMSNorm by one kernel forward and two backward.

The backward pass reads its inputs once, for both gradients. A fixed number of programs keep sums for the weight's
gradient in registers, and a second kernel adds these in a fixed order.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype, check_shape
from gsa_kernels.limits import ceil_div, next_power_of_2

TILE, PER_THREAD = 2048, 8
"""Elements of a tile, if a row is not longer, and elements of a thread: 16 bytes in bf16."""
PROGRAMS = 512
"""Largest number of programs of the backward pass, and rows of their sums."""
COLUMNS = 32
"""Columns of a program that adds these sums."""


def fused_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, accumulates: bool = False
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension. `rms_norm` defines the result.

    Args:
        x: [..., D]; bf16 or fp32; copied if not contiguous
        weight: [D], contiguous, in the dtype of x
        accumulates: add the weight's gradient to `weight.main_grad` (fp32, [D]) instead, set
            `weight.grad_added_to_main_grad`, and return an uninitialized gradient, as megatron-core's layers do
    """
    check_shape("weight", weight, "[D]", (x.shape[-1],))
    check_kernel_dtype("x", x, "fused/rms_norm/reference.py")
    if weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight is {weight.dtype} with strides {weight.stride()}; pass {x.dtype}, contiguous"
        )
    return _RMSNorm.apply(x, weight, eps, accumulates)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, accumulates: bool
    ) -> torch.Tensor:
        x = x.contiguous()
        out, columns = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // max(columns, 1)
        inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            tile = _tile(columns)
            grid = (ceil_div(rows, tile["ROWS"]),)
            _rms_norm_kernel[grid](x, weight, out, inverse_rms, rows, columns, eps, **tile)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.accumulates = accumulates
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        check_differentiated_once()
        x, weight, inverse_rms = ctx.saved_tensors
        grad_x, columns, tile = torch.empty_like(x), x.shape[-1], _tile(x.shape[-1])
        rows = len(inverse_rms)
        programs = min(PROGRAMS, ceil_div(rows, tile["ROWS"]))
        sums = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
        if rows:
            _rms_norm_backward_kernel[(programs,)](
                x, weight, grad.contiguous(), inverse_rms, grad_x, sums, rows, columns, **tile
            )
        grad_weight = torch.empty_like(weight)
        adds_to = weight.main_grad if ctx.accumulates else grad_weight
        _rms_norm_sums_kernel[(ceil_div(columns, COLUMNS),)](
            sums, adds_to, programs, columns, ADDS=ctx.accumulates, COLUMNS=COLUMNS, PARTS=64, num_warps=4
        )
        if ctx.accumulates:
            weight.grad_added_to_main_grad = True
        return grad_x, grad_weight, None, None


@cache
def _tile(columns: int) -> dict[str, int]:
    block = max(next_power_of_2(columns), 16)
    rows = max(TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // (32 * PER_THREAD), 1), 16)}


@triton.jit
def _place(first, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows from `first` on, the offsets of a tile, and which of its elements exist."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, row.to(tl.int64)[:, None] * columns + column[None, :], inside


@triton.jit
def _rms_norm_kernel(
    x, weight, out, inverse_rms, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, offsets, inside = _place(tl.program_id(0) * ROWS, rows, columns, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / columns + eps)
    weights = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    result = values * scale[:, None] * weights[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
    tl.store(inverse_rms + row, scale, mask=row < rows)


@triton.jit
def _rms_norm_backward_kernel(
    x, weight, grad, inverse_rms, grad_x, sums, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    weights = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, offsets, inside = _place(first, rows, columns, ROWS, BLOCK)
        scale = tl.load(inverse_rms + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(upstream * normed, 0)
        weighted = upstream * weights[None, :]
        along = tl.sum(weighted * normed, 1) / columns
        result = (weighted - normed * along[:, None]) * scale
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * columns + column, of_weight, mask=column < columns)


@triton.jit
def _rms_norm_sums_kernel(
    sums, out, count, columns, ADDS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (column < columns)[None, :]
        total += tl.sum(tl.load(sums + part[:, None] * columns + column[None, :], mask=inside, other=0.0), 0)
    if ADDS:
        total += tl.load(out + column, mask=column < columns, other=0.0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)
