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
        scaled: list[torch.Tensor | None] = [None] * 7
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, gradient in enumerate(ctx.saved_tensors):
            if gradient is not None and ctx.needs_input_grad[index]:
                by_dtype.setdefault(gradient.dtype, []).append(index)
        for dtype, indices in by_dtype.items():  # one launch for the small ones with the large
            products = torch._foreach_mul([ctx.saved_tensors[index] for index in indices], scale.to(dtype))
            for index, product in zip(indices, products, strict=True):
                scaled[index] = product
        return tuple(scaled)


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_sampling(row_fraction: float, seed: int | None) -> None:
    if runs_per_sampled(row_fraction) > 1 and seed is None:
        raise ValueError(f"seed is None with row_fraction {row_fraction}; pass one, equal on all ranks")
