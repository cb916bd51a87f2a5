"""Implement megatron-core's parallel linear layers with FP8 products (`train.linear_layers: fp8`).

Inputs and weights are rounded to E4M3 and gradients to E5M2, each matrix with the scale of its own largest magnitude
(current scaling). A layer has no state in addition to its bf16 weight. Under tensor parallelism the largest magnitude
is the whole matrix's, so that each rank rounds its shard as one rank would round the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from gsa_kernels.fused.fp8.reference import E4M3, E5M2, Quantized, largest, product, quantize


@dataclass(frozen=True)
class Operations:
    """Holds the two operations of a layer, `quantize` and `product` or their kernels."""

    quantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype, str], Quantized] = quantize
    product: Callable[..., torch.Tensor] = product


def operations(fused: bool) -> Operations:
    """Return kernels or the reference, which runs on CPUs."""
    if not fused:
        return Operations()
    from gsa_kernels.fused.fp8.op import fused_quantize, scaled_product  # imports Triton

    return Operations(fused_quantize, scaled_product)


@dataclass(frozen=True)
class Layout:
    """Describes what a layer's tensor-parallel ranks hold."""

    group: dist.ProcessGroup
    shards_output: bool
    """Each rank has columns of the output and of its gradient."""
    gathers_input: bool
    """Gather the tokens of the input, and reduce-scatter its gradient."""
    reduces_grad: bool
    """Sum the input's gradient over the ranks."""
    accumulates: bool
    """Add the weight's gradient to `main_grad` in fp32."""


class Fp8ColumnLinear(ColumnParallelLinear):
    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        **_: Any,
    ) -> torch.Tensor:
        layout = Layout(
            group=self.tp_group,
            shards_output=True,
            gathers_input=sequence_parallel,
            reduces_grad=allreduce_dgrad,
            accumulates=self.gradient_accumulation_fusion,
        )
        output = _Fp8Product.apply(input, weight, layout, operations(self.config.fused_ops))
        return output if bias is None else output + bias


class Fp8RowLinear(RowParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        layout = Layout(
            group=self.tp_group,
            shards_output=False,
            gathers_input=False,
            reduces_grad=False,
            accumulates=self.gradient_accumulation_fusion,
        )
        return _Fp8Product.apply(input, weight, layout, operations(self.config.fused_ops))


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layout: Layout, run: Operations
    ) -> torch.Tensor:
        ctx.shape, ctx.layout, ctx.run = inputs.shape, layout, run
        amaxes = torch.stack([largest(inputs), largest(weight)])
        if (
            layout.group.size() > 1
        ):  # The whole matrices' values. It does not change those of replicated inputs.
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=layout.group)
        keeps_columns = ctx.needs_input_grad[1] and not layout.gathers_input
        x = run.quantize(inputs.flatten(0, -2), amaxes[0], E4M3, "both" if keeps_columns else "rows")
        w = run.quantize(weight, amaxes[1], E4M3, "rows")
        assert x.rows is not None
        kept = None
        if ctx.needs_input_grad[1]:
            kept = x.rows if layout.gathers_input else x.columns
        ctx.save_for_backward(kept, x.unit, weight, amaxes)
        rows = _gathered(x.rows, layout.group) if layout.gathers_input else x.rows
        output = run.product(rows, w.rows, x.unit, w.unit, inputs.dtype, True)
        return output.view(-1, *inputs.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, x_unit, weight, amaxes = ctx.saved_tensors
        layout, run = ctx.layout, ctx.run
        amax = largest(grad_output)
        if layout.group.size() > 1 and layout.shards_output:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=layout.group)
        g = run.quantize(grad_output.flatten(0, -2), amax, E5M2, "both")
        grad_input = grad_weight = pending = None
        if ctx.needs_input_grad[0]:
            w = run.quantize(weight, amaxes[1], E4M3, "columns")
            whole = run.product(g.rows, w.columns, g.unit, w.unit, grad_output.dtype)
            grad_input, pending = _reduced(whole.view(-1, *ctx.shape[1:]), layout)
        # The reduction overlaps with the computation of the weight gradient.
        if kept is not None:
            columns = _gathered(kept, layout.group).t().contiguous() if layout.gathers_input else kept
            grad_weight = _weight_gradient(weight, g, columns, x_unit, layout.accumulates, run)
        if pending is not None:
            pending.wait()
        return grad_input, grad_weight, None, None


def _weight_gradient(
    weight: torch.Tensor,
    g: Quantized,
    inputs: torch.Tensor,
    unit: torch.Tensor,
    accumulates: bool,
    run: Operations,
) -> torch.Tensor:
    """Return the gradient for autograd. `accumulates` is as in `grad_accumulation_fusion.weight_gradient`."""
    dtype = torch.float32 if accumulates else weight.dtype
    gradient = run.product(g.columns, inputs, g.unit, unit, dtype)
    if not accumulates:
        return gradient
    parameter: Any = weight
    parameter.main_grad.add_(gradient)
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather FP8 rows, as bytes, because the backends lack FP8."""
    whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(whole.view(torch.uint8), shard.view(torch.uint8), group=group)
    return whole


def _reduced(grad: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, dist.Work | None]:
    """Start the sum of the input's partial gradients. The result is valid once the returned work is done."""
    if layout.gathers_input:
        shard = grad.new_empty(len(grad) // layout.group.size(), *grad.shape[1:])
        return shard, dist.reduce_scatter_tensor(shard, grad, group=layout.group, async_op=True)
    if layout.reduces_grad:
        return grad, dist.all_reduce(grad, group=layout.group, async_op=True)
    return grad, None
