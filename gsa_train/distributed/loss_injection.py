"""Add the indexer loss of a layer to the backward pass of the pipeline stage that holds the layer."""

from __future__ import annotations

from typing import Any

import torch

Scale = float | torch.Tensor
"""Gradient with respect to a loss: a number, or a 0-d tensor if only the device knows how many rows count in a step."""


class _InjectLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, loss: torch.Tensor, grad_scale: Scale) -> torch.Tensor:
        ctx.grad_scale = grad_scale
        ctx.of_loss = {"dtype": loss.dtype, "device": loss.device}
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad_activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale = ctx.grad_scale
        if not isinstance(scale, torch.Tensor):
            return grad_activations, torch.full((), scale, **ctx.of_loss), None
        return grad_activations, scale.to(**ctx.of_loss), None


def inject_loss(activations: torch.Tensor, loss: torch.Tensor, grad_scale: Scale) -> torch.Tensor:
    """Return `activations` unchanged, and let their backward pass also differentiate `grad_scale * loss`.

    Each pipeline stage thus differentiates its own losses. megatron-core does the same for the auxiliary loss of
    experts.

    Args:
        activations: any tensor on the path to the main loss.
        loss: 0-d.
        grad_scale: gradient with respect to `loss`.
    """
    return _InjectLoss.apply(activations, loss, grad_scale)


def differentiate_indexer_loss(
    out: torch.Tensor, loss: torch.Tensor, grad_scale: Scale, base_has_graph: bool
) -> torch.Tensor:
    """Return `out`, and let its backward pass also differentiate the layer's indexer loss.

    In the indexer warm-up, which trains only the indexer, `out` has no autograd graph. The loss is then differentiated
    immediately.

    Args:
        out: the layer's attention.
        loss: 0-d; without graph if no parameter learns from it.
        grad_scale: gradient with respect to `loss`.
    """
    if not base_has_graph:
        (loss * grad_scale).backward()
        return out
    return inject_loss(out, loss, grad_scale) if loss.requires_grad else out
