"""Computes SwiGLU with a weight per row, for experts, by one kernel forward and one backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype, check_shape
from gsa_kernels.limits import ceil_div

# These are not tuned yet. Rows of experts have some hundred columns, so few lanes of the last block are idle.
ROWS, COLUMNS, WARPS = 8, 256, 4


def fused_weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of each row, times its weight. `weighted_swiglu` defines the result.

    The function is differentiable in x and weights, and repeats bit for bit.

    Args:
        x: [N, 2F]; bf16 or fp32. Copied if not contiguous.
        weights: fp32 [N]

    Returns:
        [N, F], rounded once
    """
    check_shape("x", x, "[N, 2F]", (None, None))
    check_shape("weights", weights, "a weight for each row of x", (x.shape[0],))
    check_kernel_dtype("x", x, "fused/swiglu/reference.py")
    if x.shape[1] % 2 != 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; pass two halves in the last dimension")
    if weights.dtype != torch.float32 or weights.device != x.device:
        raise ValueError(f"weights is {weights.dtype} on {weights.device}; pass float32 on {x.device}")
    return _WeightedSwiGLU.apply(x.contiguous(), weights.contiguous())


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        rows, columns = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, columns)
        if out.numel():
            _forward_kernel[(ceil_div(rows, ROWS),)](
                x, weights, out, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_differentiated_once()
        x, weights = ctx.saved_tensors
        grad_x, grad_weights = torch.empty_like(x), torch.zeros_like(weights)
        rows, columns = grad.shape
        if grad.numel():
            _backward_kernel[(ceil_div(rows, ROWS),)](
                x,
                weights,
                grad.contiguous(),
                grad_x,
                grad_weights,
                rows,
                columns,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_warps=WARPS,
            )
        return grad_x, grad_weights


@triton.jit
def _forward_kernel(x, weights, out, rows_total, columns_total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + rows, mask=rows < rows_total, other=0.0)[:, None]
    for start in range(0, columns_total, COLUMNS):
        columns = (start + tl.arange(0, COLUMNS))[None, :]
        mask = (rows < rows_total)[:, None] & (columns < columns_total)
        wide = x + rows[:, None] * (2 * columns_total) + columns
        gate = tl.load(wide, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(wide + columns_total, mask=mask, other=0.0).to(tl.float32)
        result = gate * tl.sigmoid(gate) * value * weight
        tl.store(out + rows[:, None] * columns_total + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x,
    weights,
    grad,
    grad_x,
    grad_weights,
    rows_total,
    columns_total,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has whole rows, so that the gradients of their weights are sums in a fixed order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + rows, mask=rows < rows_total, other=0.0)[:, None]
    by_weight = tl.zeros([ROWS], tl.float32)
    for start in range(0, columns_total, COLUMNS):
        columns = (start + tl.arange(0, COLUMNS))[None, :]
        mask = (rows < rows_total)[:, None] & (columns < columns_total)
        place = rows[:, None] * (2 * columns_total) + columns
        gate = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + place + columns_total, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(grad + rows[:, None] * columns_total + columns, mask=mask, other=0.0)
        upstream = upstream.to(tl.float32)
        opening = tl.sigmoid(gate)
        by_weight += tl.sum(upstream * gate * opening * value, 1)
        upstream = upstream * weight
        # d silu = sigmoid + x sigmoid (1 - sigmoid); 1 - sigmoid(x) = sigmoid(-x) does not cancel
        by_gate = upstream * value * (opening + gate * opening * tl.sigmoid(-gate))
        by_value = upstream * gate * opening
        tl.store(grad_x + place, by_gate.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(grad_x + place + columns_total, by_value.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_weights + rows, by_weight, mask=rows < rows_total)
