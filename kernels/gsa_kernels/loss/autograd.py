"""Implements the autograd function of the indexer loss. The loss is a scalar, so its upstream gradient is one number.
The forward pass can therefore already compute the gradients, and the backward pass only multiplies them by this number.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from gsa_kernels.checks import beta_tensor, check_differentiated_once, count_queries
from gsa_kernels.indexer.score_inputs import check_indexer_dtypes
from gsa_kernels.types import Indexer

Gradients = tuple[torch.Tensor | None, ...]


def tensors_of(indexer: Indexer) -> tuple[torch.Tensor | None, ...]:
    """Return the six tensors that may require a gradient, with the inverse temperature on the queries' device."""
    return (
        indexer.queries,
        indexer.keys,
        indexer.head_weight_logits,
        indexer.score_bias,
        indexer.head_weight_bias,
        beta_tensor(indexer.inverse_temperature, indexer.queries.device),
    )


def indexer_of(tensors: Sequence[torch.Tensor | None], activation: Literal["sigmoid", "relu"]) -> Indexer:
    """Invert `tensors_of`."""
    queries, keys, head_weight_logits, score_bias, head_weight_bias, beta = tensors
    assert queries is not None
    assert keys is not None
    assert head_weight_logits is not None
    assert beta is not None
    return Indexer(queries, keys, head_weight_logits, score_bias, head_weight_bias, activation, beta)


def check_indexer(indexer: Indexer, query_start: int) -> tuple[int, int]:
    """Return B and R of inputs that the kernels support; else raise ValueError."""
    batch, num_rows = indexer.queries.shape[:2]
    num_keys = indexer.keys.shape[1]
    wanted = count_queries(query_start, num_keys)
    if num_rows != wanted:
        raise ValueError(
            f"indexer.queries has {num_rows} rows; pass {wanted}, for the queries at {query_start} .. {num_keys - 1}"
        )
    check_indexer_dtypes(indexer)
    return batch, num_rows


class LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the tensors of an indexer (`tensors_of`), its activation and a function.

        The function takes the indexer and returns the sum of the KL, the KL of each row, and the gradients of the
        indexer's tensors.
        """
        *tensors, activation, calculate = arguments
        total, rows, gradients = calculate(indexer_of(tensors, activation))
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(*gradients)
        ctx.set_materialize_grads(False)
        return total, rows

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Gradients:
        check_differentiated_once()
        scale = upstream[0]
        if scale is None:
            return (None,) * 8
        wanted = (
            g if need else None for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return *scale_gradients(tuple(wanted), scale), None, None


def scale_gradients(gradients: Gradients, factor: float | torch.Tensor) -> Gradients:
    """Multiply by the factor, 0-d, with one launch per dtype for all gradients together."""
    scaled = list(gradients)
    present = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in present):
        of_dtype = [(index, gradient) for index, gradient in present if gradient.dtype == dtype]
        by = factor.to(dtype) if isinstance(factor, torch.Tensor) else factor
        products = torch._foreach_mul([gradient for _, gradient in of_dtype], by)
        for (index, _), product in zip(of_dtype, products, strict=True):
            scaled[index] = product
    return tuple(scaled)


def needs_gradients(tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
