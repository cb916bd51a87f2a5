"""Computes a sigmoid gate by one kernel forward and one backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype, check_shape
from gsa_kernels.limits import ceil_div

BLOCK, WARPS = 4096, 8
"""Elements and warps of a program: each thread loads 32 bytes at a time in bf16."""


def fused_sigmoid_gate(x: torch.Tensor, gate_logits: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate_logits), computed in fp32 and differentiable in x and gate_logits. `sigmoid_gate` defines
    the result.

    Args:
        x: any shape; bf16 or fp32. Copied if not contiguous.
        gate_logits: the shape and dtype of x; for broadcast gates use `sigmoid_gate`

    Returns:
        the shape and dtype of x, contiguous
    """
    check_shape("gate_logits", gate_logits, "the shape of x", tuple(x.shape))
    check_kernel_dtype("x", x, "fused/gates/reference.py")
    if gate_logits.dtype != x.dtype or gate_logits.device != x.device:
        raise ValueError(
            f"gate_logits is {gate_logits.dtype} on {gate_logits.device}; pass {x.dtype} on {x.device}, as x is"
        )
    return _SigmoidGate.apply(x.contiguous(), gate_logits.contiguous())


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, logits)
        out = torch.empty_like(x)
        if x.numel():
            _gate_kernel[(ceil_div(x.numel(), BLOCK),)](
                x, logits, out, x.numel(), BLOCK=BLOCK, num_warps=WARPS
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_differentiated_once()
        x, logits = ctx.saved_tensors
        grad_x, grad_logits = torch.empty_like(x), torch.empty_like(logits)
        if x.numel():
            _gate_backward_kernel[(ceil_div(x.numel(), BLOCK),)](
                x, logits, grad.contiguous(), grad_x, grad_logits, x.numel(), BLOCK=BLOCK, num_warps=WARPS
            )
        return grad_x, grad_logits


@triton.jit
def _gate_kernel(x, logits, out, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = offsets < size
    value = tl.load(x + offsets, mask=exists, other=0.0).to(tl.float32)
    opening = tl.sigmoid(tl.load(logits + offsets, mask=exists, other=0.0).to(tl.float32))
    tl.store(out + offsets, (value * opening).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _gate_backward_kernel(x, logits, grad, grad_x, grad_logits, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = offsets < size
    value = tl.load(x + offsets, mask=exists, other=0.0).to(tl.float32)
    logit = tl.load(logits + offsets, mask=exists, other=0.0).to(tl.float32)
    upstream = tl.load(grad + offsets, mask=exists, other=0.0).to(tl.float32)
    opening = tl.sigmoid(logit)
    # 1 - sigmoid(x) = sigmoid(-x); the right side does not cancel.
    by_logit = upstream * value * opening * tl.sigmoid(-logit)
    tl.store(grad_x + offsets, (upstream * opening).to(grad_x.dtype.element_ty), mask=exists)
    tl.store(grad_logits + offsets, by_logit.to(grad_logits.dtype.element_ty), mask=exists)
