"""Accumulate weight and bias gradients directly into their fp32 buffers.

megatron-core's `gradient_accumulation_fusion` needs an Apex extension. This module replaces the extension with torch's
cuBLAS calls, so that no bf16 gradient is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import layers


class CublasAccumulation:
    """Replaces the functions of Apex's `fused_weight_gradient_mlp_cuda` that megatron-core calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """main_grad [out, in] += grad_output [tokens, out]^T inputs [tokens, in], summed in fp32."""
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=torch.float32, out=main_grad)


def weight_gradient(
    weight: torch.Tensor, inputs: torch.Tensor, grad_output: torch.Tensor, accumulates: bool
) -> torch.Tensor:
    """Return grad_output [tokens, out]^T inputs [tokens, in], for autograd.

    Args:
        accumulates: add the product to `weight.main_grad` instead, and return an uninitialized placeholder. Without a
            returned gradient, megatron-core's hook would not run.
    """
    if not accumulates:
        return grad_output.t().matmul(inputs)
    parameter: Any = weight
    CublasAccumulation.wgrad_gemm_accum_fp32(inputs, grad_output, parameter.main_grad)
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def joined_weight_gradients(
    weights: Sequence[torch.Tensor], inputs: torch.Tensor, grad_output: torch.Tensor, accumulates: bool
) -> list[torch.Tensor]:
    """Compute the result of `weight_gradient` for several weights in one product.

    The columns of grad_output are in the order of `weights`. Any further columns are ignored.
    """
    sizes = [len(weight) for weight in weights]
    if not accumulates:
        return list(grad_output[:, : sum(sizes)].t().matmul(inputs).split(sizes))
    parameters: Sequence[Any] = weights
    together = fp32_product(grad_output.t(), inputs)
    gradients = together[: sum(sizes)].split(sizes)
    torch._foreach_add_([parameter.main_grad for parameter in parameters], gradients)
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True
    return [torch.empty_like(weight) for weight in weights]


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a [n, k] @ b [k, m] of bf16 or fp16 inputs with an fp32 result. CUDA only."""
    return torch.mm(a, b, out_dtype=torch.float32)


def bias_gradient(bias: torch.Tensor, grad_output: torch.Tensor, accumulates: bool) -> torch.Tensor:
    """Sum grad_output [tokens, out] over the tokens. `accumulates` is as in `weight_gradient`."""
    if not accumulates:
        return grad_output.sum(0)
    from gsa_kernels.fused.sums.op import add_column_sums  # imports Triton

    parameter: Any = bias
    add_column_sums(grad_output, parameter.main_grad)
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(bias)


def install() -> None:
    """Register the replacement with megatron-core, whose layers check for Apex's extension."""
    module: object = layers
    setattr(module, "fused_weight_gradient_mlp_cuda", CublasAccumulation)  # noqa: B010 - absent without Apex
    setattr(module, "_grad_accum_fusion_available", True)  # noqa: B010
