"""Route tokens of an MoE layer, and update loads and biases after a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gsa_train.config import MoEConfig
from gsa_train.distributed.loss_injection import inject_loss
from gsa_train.model.budget import PreciseBuffers
from gsa_train.model.moe.routing import choose_experts, expert_counts
from gsa_train.model.probes.stats import EXPERTS, Statistics, Vector
from gsa_train.model.runtime import AttentionRuntime


class Routing(NamedTuple):
    """Holds the k experts of each of T tokens."""

    experts: torch.Tensor
    """int64 [T, k]"""
    weights: torch.Tensor
    """[T, k], fp32: weights of the experts' outputs."""
    kept: torch.Tensor | None
    """bool [T, k]: whether the choice fits the expert's capacity; None without a capacity."""


@dataclass(frozen=True)
class RouterContext:
    runtime: AttentionRuntime
    loss_scale: float
    """Factor for gradients of losses that are summed over tokens: the number of ranks over which gradients are
    averaged, divided by the tokens of a full global batch. For smaller batches of a batch ramp,
    `AttentionPass.batch_share` corrects the factor."""
    earlier_choices: Callable[[torch.Tensor], torch.Tensor]
    """Counts, for each token and expert, the earlier tokens of the whole sequence that chose the expert. Takes this
    rank's choices, bool [L, B, E], and returns int64 [L, B, E]. Collective. Called only with a capacity."""
    ranks_of_sequence: int
    """Ranks that share a sequence."""


class Router(PreciseBuffers):
    """Scores all experts for each token and chooses the top k, in fp32.

    Expert loads and biases change only in `update_routers`, after the optimizer step. All micro-batches of a step, and
    their recomputation, therefore use the same values.
    """

    layer: int
    """Layer index, from 0."""
    counts: torch.Tensor
    """int64 [E]: choices in the current step on this rank, including dropped choices."""
    loads: torch.Tensor | None
    """fp32 [E], with `balancing: global_batch`: each expert's share of choices in the previous step's global batch;
    uniform at first."""
    expert_bias: torch.Tensor | None
    """fp32 [E], with `balancing: aux_free`."""

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        context: RouterContext,
        sequence_parallel: bool,
        **of_weight: Any,
    ) -> None:
        """
        Args:
            sequence_parallel: sum the weight's gradients over the tensor-parallel ranks, which have different tokens.
            of_weight: dtype and device of the weight.
        """
        super().__init__()
        self.moe, self.context = moe, context
        self.weight = torch.nn.Parameter(torch.empty(moe.experts, hidden_size, **of_weight))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        device = self.weight.device
        self.register_buffer(
            "counts", torch.zeros(moe.experts, dtype=torch.int64, device=device), persistent=False
        )
        equal = torch.full((moe.experts,), 1 / moe.experts, device=device)
        self.register_buffer("loads", equal if moe.balancing == "global_batch" else None)
        zero = torch.zeros(moe.experts, device=device)
        self.register_buffer("expert_bias", zero if moe.balancing == "aux_free" else None)

    def balance(self) -> list[torch.Tensor]:
        """Return the buffers that a step updates, which are equal on all ranks with this layer."""
        return [held for held in (self.loads, self.expert_bias) if held is not None]

    def forward(self, hidden: torch.Tensor) -> Routing:
        """Route this rank's hidden [L, B, d], where T = L B."""
        moe = self.moe
        attention_pass = self.context.runtime.pass_of_this_forward()
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logits = torch.nn.functional.linear(hidden.flatten(0, 1).to(precise), self.weight.to(precise))
        scores = logits.softmax(-1) if moe.router_score == "softmax" else logits.sigmoid()
        experts, weights = choose_experts(scores, self.expert_bias, moe.top_k, moe.routed_scale)
        if attention_pass.has_graph:
            self.counts += expert_counts(experts, moe.experts)
            scale = self.context.loss_scale / attention_pass.batch_share
            weights = self._inject_losses(weights, scores, logits, scale)
        kept = self._kept(experts, hidden.shape[:2]) if moe.capacity_factor > 0 else None
        if attention_pass.measures:
            self._measure(logits, scores, experts, kept)
        return Routing(experts, weights, kept)

    def _inject_losses(
        self, weights: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Add the gradients of losses that are summed over tokens to the gradient of the weights."""
        moe = self.moe
        if self.loads is not None and moe.balance_coeff > 0:
            # E sum_i f_i p_i with loads f, score shares p (arXiv 2501.11873, eq. 2)
            balance = moe.experts * (_shares(scores).sum(0) * self.loads).sum()
            weights = inject_loss(weights, balance, moe.balance_coeff * scale)
        if moe.z_loss_coeff > 0:  # ST-MoE, arXiv 2202.08906, eq. 5
            z_loss = logits.logsumexp(-1).square().sum()
            weights = inject_loss(weights, z_loss, moe.z_loss_coeff * scale)
        return weights

    @torch.no_grad()
    def _measure(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, kept: torch.Tensor | None
    ) -> None:
        shares = _shares(scores)
        means = {
            "router_entropy": torch.special.entr(shares).sum(-1),
            "router_z": logits.logsumexp(-1).square(),
        }
        if self.loads is not None:
            means["router_balance"] = self.moe.experts * shares @ self.loads
        if kept is not None:
            means["dropped_share"] = ~kept
        if self.expert_bias is not None:
            means["expert_bias_range"] = self.expert_bias.max() - self.expert_bias.min()
        of_experts = {EXPERTS: Vector(expert_counts(experts, self.moe.experts))}
        self.context.runtime.stats.record(self.layer, Statistics(means, vectors=of_experts))

    def _kept(self, experts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return bool [T, k]: whether the choice fits the capacity. Only earlier tokens take capacity from a token."""
        moe, tokens = self.moe, shape[0] * self.context.ranks_of_sequence
        capacity = math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.experts)
        chosen = torch.zeros(len(experts), moe.experts, dtype=torch.bool, device=experts.device)
        chosen = chosen.scatter_(1, experts, True)
        earlier = self.context.earlier_choices(chosen.unflatten(0, shape)).flatten(0, 1)
        return earlier.gather(1, experts) < capacity


def _shares(scores: torch.Tensor) -> torch.Tensor:
    """Divide each token's scores [T, E] by their sum."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


@torch.no_grad()
def update_routers(routers: Sequence[Router], group: dist.ProcessGroup, applied: torch.Tensor) -> None:
    """Update loads and biases from the choices of a step over all ranks, and reset the counts. Collective.

    Call this after each step that trains the base model. If `applied` (0-d bool) is False, loads and biases do not
    change. The device reads `applied`, so the host does not wait.

    Args:
        group: ranks of this stage over which the tokens of the global batch are sharded.
    """
    if not routers:
        return
    moe = routers[0].moe
    if moe.balancing != "none":
        counts = torch.stack([router.counts for router in routers])
        dist.all_reduce(counts, group=group)
        name = "loads" if moe.balancing == "global_batch" else "expert_bias"
        held = [getattr(router, name) for router in routers]
        before = torch.stack(held)
        if moe.balancing == "global_batch":
            after = (counts.double() / counts.sum(-1, keepdim=True)).float()
        else:
            # arXiv 2408.15664, algorithm 1
            short = (counts.double().mean(-1, keepdim=True) - counts).sign()
            after = before + moe.bias_update_rate * short.to(before.dtype)
        torch._foreach_copy_(held, list(torch.where(applied, after, before).unbind()))
    torch._foreach_zero_([router.counts for router in routers])
