"""The router of one layer, and what a step makes of all routers' counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gsa_train.config import MoEConfig
from gsa_train.distributed.loss_injection import inject_loss
from gsa_train.model.moe.routing import (
    balance_loss,
    choose_experts,
    expert_capacity,
    expert_counts,
    moved_biases,
    scores_of,
    z_loss,
)
from gsa_train.model.moe.statistics import router_statistics
from gsa_train.model.runtime import AttentionRuntime


class Routing(NamedTuple):
    """Where T tokens go, each to k experts."""

    experts: torch.Tensor
    """int64 [T, k]"""
    weights: torch.Tensor
    """[T, k], fp32: of the experts' outputs."""
    kept: torch.Tensor | None
    """bool [T, k]: the expert has room for the token; None: all have."""


@dataclass(frozen=True)
class RouterContext:
    """What routers need of the run; the same for all layers."""

    runtime: AttentionRuntime
    loss_scale: float
    """Factor from a sum over tokens to its share of the gradient: (ranks over which gradients are averaged) / (tokens
    of the global batch)."""
    earlier_choices: Callable[[torch.Tensor], torch.Tensor]
    """Takes which experts this rank's tokens chose, bool [L, B, E]; returns how many earlier tokens of the sequence, on
    all its ranks, chose each, int64 [L, B, E]. Collective. Called with a capacity alone."""
    ranks_of_sequence: int
    """Number of ranks that share the tokens of a sequence."""


class Router(torch.nn.Module):
    """h -> scores of all experts -> the best k of them, in fp32.

    What balances it changes in `update_routers` alone, after the optimizer step: all micro-batches of a step, and its
    recomputation, see the values from before it. They are buffers, so they are saved with the model.
    """

    layer: int
    """Number of its layer, from 0."""
    counts: torch.Tensor
    """int64 [E]: choices of the step under way on this rank, before any is dropped."""
    loads: torch.Tensor | None
    """fp32 [E], with `balancing: global_batch`: shares of the choices of the last step's global batch; equal at
    first."""
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
            sequence_parallel: tensor-parallel ranks see slices of the tokens, so the weight's gradients must be summed.
            of_weight: dtype and device.
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

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Buffers move between devices but keep their precision: megatron-core casts a bf16 model's."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def balance(self) -> list[torch.Tensor]:
        """What a step moves, the same on all ranks that have this layer."""
        return [held for held in (self.loads, self.expert_bias) if held is not None]

    def forward(self, hidden: torch.Tensor) -> Routing:
        """hidden [L, B, d] of this rank's tokens -> their routing, T = L B."""
        moe = self.moe
        attention_pass = self.context.runtime.pass_of_this_forward()
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logits = torch.nn.functional.linear(hidden.flatten(0, 1).to(precise), self.weight.to(precise))
        scores = scores_of(logits, moe.router_score)
        experts, weights = choose_experts(scores, self.expert_bias, moe.top_k, moe.routed_scale)
        if attention_pass.has_graph:
            self.counts += expert_counts(experts, moe.experts)
            weights = self._inject_losses(weights, scores, logits)
        kept = self._kept(experts, hidden.shape[:2]) if moe.capacity_factor > 0 else None
        if attention_pass.measures:
            measured = router_statistics(logits, scores, experts, kept, self.loads, self.expert_bias)
            self.context.runtime.stats.record(self.layer, measured)
        return Routing(experts, weights, kept)

    def _inject_losses(
        self, weights: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        moe, scale = self.moe, self.context.loss_scale
        if self.loads is not None and moe.balance_coeff > 0:
            weights = inject_loss(weights, balance_loss(scores, self.loads), moe.balance_coeff * scale)
        if moe.z_loss_coeff > 0:
            weights = inject_loss(weights, z_loss(logits), moe.z_loss_coeff * scale)
        return weights

    def _kept(self, experts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """bool [T, k]: the expert had room. First come, first served, so that no later token drops an earlier one."""
        moe, tokens = self.moe, shape[0] * self.context.ranks_of_sequence
        capacity = expert_capacity(moe.capacity_factor, tokens, moe.top_k, moe.experts)
        chosen = torch.zeros(len(experts), moe.experts, dtype=torch.bool, device=experts.device)
        chosen = chosen.scatter_(1, experts, True)
        earlier = self.context.earlier_choices(chosen.unflatten(0, shape)).flatten(0, 1)
        return earlier.gather(1, experts) < capacity


@torch.no_grad()
def update_routers(routers: Sequence[Router], group: dist.ProcessGroup, applied: torch.Tensor) -> None:
    """Loads and biases after a step that trained the base, from its counts over all ranks; resets the counts.

    All stay as they were where the step is not `applied` (0-d bool). Nothing is read back to the host.

    Args:
        routers: of this rank's stage.
        group: the ranks over which the tokens of the global batch are spread on this stage. Collective.
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
            after = moved_biases(before, counts, moe.bias_update_rate)
        torch._foreach_copy_(held, list(torch.where(applied, after, before).unbind()))
    torch._foreach_zero_([router.counts for router in routers])
