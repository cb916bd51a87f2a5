"""What a step of AdamW changed, from its moments after the step."""

import torch


def squared_update(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rate: torch.Tensor,
    eps: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """Sum of (rate exp_avg / (sqrt(exp_avg_sq) + eps) + decay weight)^2 over a parameter's elements: 0-d fp64.

    Args:
        weight, exp_avg, exp_avg_sq: of one shape; after the step
        rate, eps: 0-d; the corrections of both moments' bias are in them
    """
    update = exp_avg.float() / exp_avg_sq.float().sqrt().add_(eps)
    update.mul_(rate).add_(weight, alpha=decay)
    return torch.linalg.vector_norm(update, dtype=torch.float64).square()
