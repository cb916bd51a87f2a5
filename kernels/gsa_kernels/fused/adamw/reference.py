"""Computes how much a step of AdamW changed the weights, from the moments after the step."""

import torch


def squared_update(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rate: torch.Tensor,
    eps: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """Sum (rate exp_avg / (sqrt(exp_avg_sq) + eps) + decay weight)^2 over a parameter's elements: 0-d fp64.

    Args:
        weight, exp_avg, exp_avg_sq: equal shapes; values after the step
        rate, eps: 0-d; they include the bias corrections of both moments
    """
    update = exp_avg.float() / exp_avg_sq.float().sqrt().add_(eps)
    update.mul_(rate).add_(weight, alpha=decay)
    return torch.linalg.vector_norm(update, dtype=torch.float64).square()
