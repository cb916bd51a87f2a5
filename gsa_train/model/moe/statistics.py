"""Compute router statistics of logged steps."""

from __future__ import annotations

import torch

from gsa_train.model.moe.routing import expert_counts
from gsa_train.model.probes.stats import EXPERTS, Statistics, Vector


@torch.no_grad()
def router_statistics(
    logits: torch.Tensor,
    scores: torch.Tensor,
    experts: torch.Tensor,
    kept: torch.Tensor | None,
    loads: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Statistics:
    """Measure the routing of T tokens to k of E experts each.

    Args:
        logits, scores: [T, E].
        experts: the chosen experts, int64 [T, k].
        kept: bool [T, k]; None without a capacity.
        loads: loads in this step's balance loss, [E]; None without `balancing: global_batch`.
        bias: [E]; None without `balancing: aux_free`.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    means = {
        "router_entropy": torch.special.entr(shares).sum(-1),
        "router_z": logits.logsumexp(-1).square(),
    }
    if loads is not None:
        means["router_balance"] = len(loads) * shares @ loads
    if kept is not None:
        means["dropped_share"] = ~kept
    if bias is not None:
        means["expert_bias_range"] = bias.max() - bias.min()
    return Statistics(means, vectors={EXPERTS: Vector(expert_counts(experts, scores.shape[1]))})
