"""What both forms of the indexer's loss share: argument checks, and an autograd function that only scales.

The KL is linear in its upstream gradient, a scalar per loss, so the forward pass calculates the gradients, too.
"""

from collections.abc import Callable
from typing import Any

import torch

from gsa_kernels.sampling import runs_per_sampled

Gradients = tuple[torch.Tensor | None, ...]
Calculate = Callable[..., tuple[torch.Tensor, torch.Tensor, Gradients]]
"""(q_idx, k_idx, weight_logits, score_bias, weight_bias, beta) -> the sum, the KL of each row, and the gradients in
the order of the arguments."""


class LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Six tensors, of which some may be None, and a `Calculate`."""
        *tensors, calculate = arguments
        total, rows, gradients = calculate(*tensors)
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(*gradients)
        ctx.set_materialize_grads(False)
        return total, rows

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Gradients:
        scale = upstream[0]
        if scale is None:
            return (None,) * 7
        wanted = (
            g if need else None for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return *scale_gradients(tuple(wanted), scale), None


def scale_gradients(gradients: Gradients, factor: float | torch.Tensor) -> Gradients:
    """Times the factor, 0-d: for each dtype one launch, for the small ones with the large."""
    scaled = list(gradients)
    present = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in present):
        of_dtype = [(index, gradient) for index, gradient in present if gradient.dtype == dtype]
        by = factor.to(dtype) if isinstance(factor, torch.Tensor) else factor
        products = torch._foreach_mul([gradient for _, gradient in of_dtype], by)
        for (index, _), product in zip(of_dtype, products, strict=True):
            scaled[index] = product
    return tuple(scaled)


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_sampling(row_fraction: float, seed: int | None) -> None:
    if runs_per_sampled(row_fraction) > 1 and seed is None:
        raise ValueError(f"seed is None with row_fraction {row_fraction}; pass one, equal on all ranks")
