"""Project hidden states to gate logits: G2 on values (eq. 9), G1 on the output (eq. 10), and variants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear

from gsa_train.config.gates import ON_HEADS, gate_rows
from gsa_train.model.gate_variants import HeadGate, ReplicatedGate, opening
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.grad_accumulation_fusion import bias_gradient, weight_gradient
from gsa_train.model.probes.stats import GATE_BINS, Statistics, Vector


class GateProjection(ColumnParallelLinear):
    """Runs first among several linear layers with the same input, and communicates for all of them.

    Together, these layers need only one all-gather and one reduction over the tensor-parallel ranks. In the forward
    pass, this layer gathers its input and returns the gathered input for the other layers. In the backward pass, this
    layer adds its input gradient to the sum of the others, and reduces the result.
    """

    def forward(self, input_: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [L, B, local rows] with bias, and the gathered input of all L tokens.

        The gathered input's gradient may be this rank's partial sum.

        Args:
            input_: [L, B, d] ([L / tp, B, d] under sequence parallelism).
        """
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
        # F.linear is avoided: DeepSpeed's replacement rounds before adding the bias.
        logits = torch.addmm(bias, shared.flatten(0, 1), weight.t())
        return logits.unflatten(0, shared.shape[:2]), shared

    @staticmethod
    def backward(
        ctx: Any, grad_logits: torch.Tensor, grad_shared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        shared, weight, bias = ctx.saved_tensors
        rows = grad_logits.flatten(0, 1)
        # The other layers' gradient may be overwritten, because no other code reads it.
        grad_hidden = grad_shared.contiguous()
        grad_hidden.flatten(0, 1).addmm_(rows, weight)
        # The reduction overlaps with the computation of the weight gradient.
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


class GateLogits(NamedTuple):
    """Holds the logits of each gate that acts on heads, or None for a gate that the model lacks.

    In the shapes, `...` stands for [L, B]. n_kv is the number of this rank's key-value heads. x is d_k, or 1 if one
    gate serves all channels of a head. If all heads share their gates, the dimensions n_kv and n_h / n_kv both have
    size 1.
    """

    value: torch.Tensor | None = None
    """G2 [..., n_kv, x]"""
    output: torch.Tensor | None = None
    """G1 [..., n_kv, n_h / n_kv, x]"""
    key: torch.Tensor | None = None
    """G3 [..., n_kv, x]"""
    query: torch.Tensor | None = None
    """G4 [..., n_kv, n_h / n_kv, x]"""


def build_gate_projection(
    config: GSATransformerConfig, groups: ProcessGroupCollection
) -> GateProjection | None:
    """Build one matrix for all per-head gates. Return None if the model has no such gates.

    The matrix has one group of rows for each key-value head. With m = n_h / n_kv, the rows of a group are, in this
    order:

    - value gate: d_k rows;
    - output gate: m * d_k rows;
    - G3 (gate on keys): d_k rows;
    - G4 (gate on queries): m * d_k rows.

    A gate that the model lacks has no rows. If gates are headwise, d_k is replaced by 1 in these numbers. Each
    tensor-parallel rank holds the rows of its heads.
    """
    if not has_gate_projection(config):
        return None
    projection = GateProjection(
        config.hidden_size,
        head_gate_rows(config),
        config=config,
        init_method=config.init_method,
        bias=True,
        gather_output=False,
        tp_group=groups.tp,
    )
    for parameter in projection.parameters():
        parameter.gsa_gate = True  # its own learning rate (optimizer/mcore.py)
    return projection


def build_head_gate(
    config: GSATransformerConfig, groups: ProcessGroupCollection
) -> HeadGate | ReplicatedGate | None:
    """Build the module for gate logits without a projection (`gsa.gate_input`, `gsa.gate_sharing`), or return None."""
    if has_gate_projection(config) or head_gate_rows(config) == 0:
        return None
    if config.gsa.gate_sharing == "head_shared":
        return ReplicatedGate(config, groups, head_gate_rows(config), for_heads=True)
    return HeadGate(config, groups, head_gate_rows(config))


def has_gate_projection(config: GSATransformerConfig) -> bool:
    gsa = config.gsa
    own = gsa.gate_sharing == "head_specific" and gsa.gate_input == "query_dependent"
    return own and head_gate_rows(config) > 0


def head_gate_rows(config: GSATransformerConfig) -> int:
    return sum(_rows(config))


def split_gate_logits(logits: torch.Tensor, config: GSATransformerConfig) -> GateLogits:
    """Split [..., local rows] into the logits of each gate."""
    rows = rows_per_group(config)
    parts = logits.unflatten(-1, (-1, sum(rows))).split(list(rows), -1)
    of_each = {position: part for position, part in zip(ON_HEADS, parts, strict=True) if part.shape[-1]}
    if unknown := [position for position in of_each if position not in GateLogits._fields]:
        raise ValueError(f"gates {unknown} have rows and no field; add it to GateLogits, and apply the gate")
    x = 1 if config.gsa.gate_granularity == "headwise" else config.kv_channels
    for position in ("output", "query"):  # a gate for each query head
        if position in of_each:
            of_each[position] = of_each[position].unflatten(-1, (-1, x))
    return GateLogits(**of_each)


def gate_statistics(
    logits: torch.Tensor, config: GSATransformerConfig, bins: tuple[torch.Tensor, torch.Tensor]
) -> Statistics:
    """Measure how far G1 and G2 are open. Empty for unbounded activations, which have no open or closed state.

    Args:
        logits: [T, B, local rows], detached.
    """
    statistics = Statistics()
    if config.gsa.gate_activation not in ("sigmoid", "ns_sigmoid"):
        return statistics
    rows = rows_per_group(config)
    gates = opening(logits.float(), config.gsa)
    numbers, edges = bins
    # Non-finite values fall into the last bin.
    places = torch.bucketize(gates, edges, right=True)
    # [rows of a key-value head, bins] for all gates together
    in_bins = (places.unflatten(-1, (-1, sum(rows)))[..., None] == numbers).sum((0, 1, 2)).split(rows)
    of_each = split_gate_logits(gates, config)
    for name, gate, counts in (
        ("value_gate", of_each.value, in_bins[0]),
        ("output_gate", of_each.output, in_bins[1]),
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
    """Return the bin numbers of the gate histograms and the edges between bins."""
    numbers = torch.arange(GATE_BINS, device=device)
    return numbers, numbers[1:] / GATE_BINS


def _rows(config: GSATransformerConfig) -> list[int]:
    rows = gate_rows(
        config.gsa,
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        config.hidden_size,
    )
    return [rows[position] for position in ON_HEADS]


def rows_per_group(config: GSATransformerConfig) -> tuple[int, ...]:
    """Return each per-head gate's number of rows for one key-value head, or for all heads with shared gates."""
    groups = config.num_query_groups if config.gsa.gate_sharing == "head_specific" else 1
    return tuple(rows // groups for rows in _rows(config))
