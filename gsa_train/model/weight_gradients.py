"""Weight gradients: products over all tokens.

Those of the base are added to their fp32 buffers by the product itself. megatron-core does so with an extension of Apex
(`gradient_accumulation_fusion`). cuBLAS can, through torch, without: no gradient in bf16 is written, rounded and read
again. The indexer's has few rows, so it is calculated in parts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers

PARTS = 8
"""Of a gradient with few rows. 328 x 2048, the 1.7B model's, are 48 tiles of 128 x 128 on the 132 multiprocessors of an
H200; in 8 parts they are 384, three rounds of which fill 97%."""

TOKENS_PER_PART = 1024
"""At least: a part's result is written and read in fp32, which takes as long as the product of about 150 tokens."""


class CublasAccumulation:
    """What megatron-core calls of Apex's `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """main_grad [out, in] += grad_output [tokens, out]^T inputs [tokens, in], summed in fp32."""
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=torch.float32, out=main_grad)


def weight_gradient(
    weight: torch.Tensor, inputs: torch.Tensor, grad_output: torch.Tensor, accumulates: bool
) -> torch.Tensor:
    """grad_output [tokens, out]^T inputs [tokens, in], for autograd.

    Args:
        accumulates: add it to `weight.main_grad` instead. What is returned then holds nothing: megatron-core's hook,
            which waits for a gradient, runs where there is one.
    """
    if not accumulates:
        return grad_output.t().matmul(inputs)
    parameter: Any = weight
    CublasAccumulation.wgrad_gemm_accum_fp32(inputs, grad_output, parameter.main_grad)
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def linear_of_few_rows(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inputs [..., in] weight [out, in]^T, whose gradient is summed over `PARTS` parts of the tokens.

    With few outputs one product per gradient leaves most of a GPU without work.
    """
    found: torch.Tensor = _LinearOfFewRows.apply(inputs, weight)
    return found


class _LinearOfFewRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad_inputs = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_inputs = grad.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2)
            enough = len(rows) % PARTS == 0 and len(rows) >= PARTS * TOKENS_PER_PART
            grad_weight = gradient_in_parts(inputs.flatten(0, -2), rows, PARTS if enough else 1)
        return grad_inputs, grad_weight


def gradient_in_parts(inputs: torch.Tensor, grad_output: torch.Tensor, parts: int) -> torch.Tensor:
    """grad_output [tokens, out]^T inputs [tokens, in], the sums of the parts in fp32 and added in their order.

    Args:
        parts: divides the tokens
    """
    if parts == 1:
        return grad_output.t().matmul(inputs)
    left = grad_output.unflatten(0, (parts, -1)).transpose(1, 2)
    right = inputs.unflatten(0, (parts, -1))
    halves = inputs.dtype in (torch.bfloat16, torch.float16)
    if halves and inputs.is_cuda:
        sums = torch.bmm(left, right, out_dtype=torch.float32)
    else:  # CPUs have no products with results of another type
        sums = torch.bmm(left.float(), right.float()) if halves else torch.bmm(left, right)
    return sums.sum(0).to(inputs.dtype)


def install() -> None:
    """Offer it to megatron-core, whose layers ask whether Apex's extension is there."""
    module: object = layers
    setattr(module, "fused_weight_gradient_mlp_cuda", CublasAccumulation)  # noqa: B010 - absent without Apex
    setattr(module, "_grad_accum_fusion_available", True)  # noqa: B010
