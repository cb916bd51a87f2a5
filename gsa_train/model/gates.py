"""The projection behind both gates: G2 on the values (eq. 9) and G1 on the output (eq. 10)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear

from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.grad_accumulation_fusion import bias_gradient, weight_gradient
from gsa_train.model.stats import GATE_BINS, Statistics, Vector


class GateProjection(ColumnParallelLinear):
    """The first of several products of one input, whose communication it does for all of them.

    The others take the input from here. Their gradients of it arrive summed in one tensor, to which this product adds
    its own: no pass over memory for the sum, and over the tensor-parallel ranks one gather and one reduction.
    """

    def forward(self, input_: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, B, d] ([L / tp, B, d] under sequence parallelism) -> logits [L, B, local rows], bias included, and the
        input of all L tokens, whose gradient may be this rank's part of the sum."""
        logits, shared = _LogitsAndInput.apply(
            input_,
            self.weight,
            self.bias,
            self.tp_group,
            self.sequence_parallel,
            self.gradient_accumulation_fusion,
        )
        return logits, shared


class _LogitsAndInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        accumulates: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = hidden.view_as(hidden)
        if sequence_parallel:
            shared = hidden.new_empty(group.size() * hidden.shape[0], *hidden.shape[1:])
            dist.all_gather_into_tensor(shared, hidden.contiguous(), group=group)
        ctx.save_for_backward(shared, weight, bias)
        ctx.group, ctx.sequence_parallel, ctx.accumulates = group, sequence_parallel, accumulates
        # Not F.linear, for which DeepSpeed puts one that rounds before it adds the bias.
        logits = torch.addmm(bias, shared.flatten(0, 1), weight.t())
        return logits.unflatten(0, shared.shape[:2]), shared

    @staticmethod
    def backward(
        ctx: Any, grad_logits: torch.Tensor, grad_shared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        shared, weight, bias = ctx.saved_tensors
        rows = grad_logits.flatten(0, 1)
        # The other products' gradient has no reader but this one.
        grad_hidden = grad_shared.contiguous()
        grad_hidden.flatten(0, 1).addmm_(rows, weight)
        # The weight's gradient is calculated meanwhile.
        pending = None
        if ctx.sequence_parallel:
            summed = grad_hidden
            grad_hidden = summed.new_empty(summed.shape[0] // ctx.group.size(), *summed.shape[1:])
            pending = dist.reduce_scatter_tensor(grad_hidden, summed, group=ctx.group, async_op=True)
        elif ctx.group.size() > 1:
            pending = dist.all_reduce(grad_hidden, group=ctx.group, async_op=True)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(weight, shared.flatten(0, 1), rows, ctx.accumulates)
            grad_bias = bias_gradient(bias, rows, ctx.accumulates)
        if pending is not None:
            pending.wait()
        return grad_hidden, grad_weight, grad_bias, None, None, None


def build_gate_projection(
    config: GSATransformerConfig, groups: ProcessGroupCollection
) -> GateProjection | None:
    """One matrix for both gates, or None without gates.

    Rows per key-value head: the value gate's d_k, then the output gate's (n_h / n_kv) * d_k. A tensor-parallel
    rank so holds the gates of exactly its own heads.
    """
    if not has_gates(config):
        return None
    projection = GateProjection(
        config.hidden_size,
        config.num_query_groups * sum(_rows_per_group(config)),
        config=config,
        init_method=config.init_method,
        bias=True,
        gather_output=False,
        tp_group=groups.tp,
    )
    for parameter in projection.parameters():
        parameter.gsa_gate = True  # its own learning rate (optimizer/mcore.py)
    return projection


def has_gates(config: GSATransformerConfig) -> bool:
    return sum(_rows_per_group(config)) > 0


def split_gate_logits(
    logits: torch.Tensor, config: GSATransformerConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """[L, B, local rows] -> logits of G2 [L, B, local n_kv, d_k] and of G1 [L, B, local n_kv, n_h / n_kv, d_k]."""
    value_rows, output_rows = _rows_per_group(config)
    per_group = logits.unflatten(-1, (-1, value_rows + output_rows))
    value, output = per_group.split([value_rows, output_rows], -1)
    return (
        value if value_rows else None,
        output.unflatten(-1, (-1, config.kv_channels)) if output_rows else None,
    )


def gate_statistics(
    logits: torch.Tensor, config: GSATransformerConfig, bins: tuple[torch.Tensor, torch.Tensor]
) -> Statistics:
    """How far both gates are open.

    Args:
        logits: of some tokens, [T, B, local rows], without graph.
        bins: `gate_bins`
    """
    rows = _rows_per_group(config)
    opening = logits.float().sigmoid()
    numbers, edges = bins
    # What is not finite is in the last one.
    places = torch.bucketize(opening, edges, right=True)
    # [rows of a key-value head, bins], both gates at once.
    in_bins = (places.unflatten(-1, (-1, sum(rows)))[..., None] == numbers).sum((0, 1, 2)).split(rows)
    statistics = Statistics()
    for name, gate, counts in zip(
        ("value_gate", "output_gate"), split_gate_logits(opening, config), in_bins, strict=True
    ):
        if gate is None:
            continue
        statistics.means[f"{name}_mean"] = gate
        for what, bin in (("low", 0), ("high", GATE_BINS - 1)):
            statistics.means[f"{name}_{what}"] = counts[:, bin]
            statistics.counts[f"{name}_{what}"] = gate.numel()
        statistics.vectors[f"{name}_histogram"] = Vector(counts)
    return statistics


def gate_bins(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the gates' histograms: their numbers, and the edges between them."""
    numbers = torch.arange(GATE_BINS, device=device)
    return numbers, numbers[1:] / GATE_BINS


def _rows_per_group(config: GSATransformerConfig) -> tuple[int, int]:
    heads_per_group = config.num_attention_heads // config.num_query_groups
    return (
        config.kv_channels if config.gsa.value_gate else 0,
        config.kv_channels * heads_per_group if config.gsa.output_gate else 0,
    )
