"""Choose and count experts. Symbols: T tokens, E experts, k per token."""

from __future__ import annotations

import torch


def choose_experts(
    scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k experts of each token and the weights of their outputs.

    Args:
        scores: [T, E].
        bias: [E], added for the choice only (arXiv 2408.15664, eq. 3).
        scale: `moe.routed_scale`, the sum of a token's weights.

    Returns:
        int64 [T, k], experts; [T, k], weights.
    """
    ranked = scores.detach() if bias is None else scores.detach() + bias
    experts = ranked.topk(top_k, dim=-1).indices
    chosen = scores.gather(-1, experts)
    return experts, scale * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def expert_counts(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Count how often each expert occurs in `experts`: int64 [count]. The sums are integers, so they do not depend on
    the order of the additions."""
    flat = experts.flatten()
    return torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
