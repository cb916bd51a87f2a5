"""Compute the choice of experts, the balance loss and the z-loss as plain functions.

Symbols: T tokens, E experts, k per token. Results are computed in fp32, or in fp64 for fp64 logits.
"""

from __future__ import annotations

import math

import torch


def scores_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Map logits [T, E] to scores in (0, 1), [T, E].

    Args:
        score: `moe.router_score`.
    """
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


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
    """Count the occurrences of each expert in `experts`: int64 [count]. Integer sums do not depend on the order of
    additions."""
    flat = experts.flatten()
    return torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )


def balance_loss(scores: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of E sum_i f_i p_i with loads f, score shares p (arXiv 2501.11873, eq. 2): 0-d.

    Args:
        scores: [T, E]; p is each row divided by its sum.
        loads: [E], f: each expert's share of all choices; without gradient.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return len(loads) * (shares.sum(0) * loads).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of the squared log-sum-exp of their logits [T, E] (ST-MoE, arXiv 2202.08906, eq.
    5): 0-d."""
    return logits.logsumexp(-1).square().sum()


def moved_biases(biases: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the biases after a step that sent `counts` choices to each expert (arXiv 2408.15664, algorithm 1).

    Args:
        biases: [..., E], fp32.
        counts: [..., E].
    """
    counts = counts.double()
    return biases + rate * (counts.mean(-1, keepdim=True) - counts).sign().to(biases.dtype)


def expert_capacity(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Return the number of choices that an expert accepts from a sequence of `tokens` tokens."""
    return math.ceil(factor * tokens * top_k / experts)
