"""Implement megatron-core's parallel linear layers with FP8 products (`train.linear_layers: fp8`).

Inputs and weights are rounded to E4M3 and gradients to E5M2, each matrix with the scale of its own largest magnitude
(current scaling). A layer has no state in addition to its bf16 weight. Under tensor parallelism the largest magnitude
is the whole matrix's, so that each rank rounds its shard as one rank would round the whole matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from gsa_kernels.fused.fp8 import reference
from gsa_kernels.fused.fp8.reference import E4M3, E5M2, Quantized, largest


class Fp8ColumnLinear(ColumnParallelLinear):
    shards_output = True
    """Each rank has columns of the output and of its gradient."""

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
        output = _Fp8Product.apply(input, weight, self, sequence_parallel, allreduce_dgrad)
        return output if bias is None else output + bias


class Fp8RowLinear(RowParallelLinear):
    shards_output = False

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        return _Fp8Product.apply(input, weight, self, False, False)


class _Fp8Product(torch.autograd.Function):
    """Computes x W^T.

    Args of `apply`:
        layer: one of the classes above.
        gathers: gather the tokens of the input, and reduce-scatter its gradient (sequence parallelism).
        reduces: sum the input's gradient over the tensor-parallel ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: Any, gathers: bool, reduces: bool
    ) -> torch.Tensor:
        ctx.shape, ctx.layer, ctx.gathers, ctx.reduces = inputs.shape, layer, gathers, reduces
        amaxes = torch.stack([largest(inputs), largest(weight)])
        if layer.tp_group.size() > 1:  # This does not change the value of an input that all ranks have.
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=layer.tp_group)
        keeps = ctx.needs_input_grad[1]
        x = quantize(inputs.flatten(0, -2), amaxes[0], E4M3, "both" if keeps and not gathers else "rows")
        w = quantize(weight, amaxes[1], E4M3, "rows")
        kept = (x.rows if gathers else x.columns) if keeps else None
        ctx.save_for_backward(kept, x.unit, weight, amaxes)
        rows = _gathered(x.rows, layer.tp_group) if gathers else x.rows
        output = product(rows, w.rows, x.unit, w.unit, inputs.dtype, fast=True)
        return output.view(-1, *inputs.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, x_unit, weight, amaxes = ctx.saved_tensors
        layer, group = ctx.layer, ctx.layer.tp_group
        amax = largest(grad_output)
        if group.size() > 1 and layer.shards_output:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        g = quantize(grad_output.flatten(0, -2), amax, E5M2, "both")
        grad_input = grad_weight = pending = None
        if ctx.needs_input_grad[0]:
            w = quantize(weight, amaxes[1], E4M3, "columns")
            whole = product(g.rows, w.columns, g.unit, w.unit, grad_output.dtype)
            grad_input = whole = whole.view(-1, *ctx.shape[1:])
            # The reduction overlaps with the computation of the weight gradient.
            if ctx.gathers:
                grad_input = whole.new_empty(ctx.shape)
                pending = dist.reduce_scatter_tensor(grad_input, whole, group=group, async_op=True)
            elif ctx.reduces:
                pending = dist.all_reduce(grad_input, group=group, async_op=True)
        if kept is not None:
            columns = _gathered(kept, group).t().contiguous() if ctx.gathers else kept
            accumulates = layer.gradient_accumulation_fusion
            dtype = torch.float32 if accumulates else weight.dtype
            grad_weight = product(g.columns, columns, g.unit, x_unit, dtype)
            if accumulates:  # as in grad_accumulation_fusion.weight_gradient
                weight.main_grad.add_(grad_weight)
                weight.grad_added_to_main_grad = True
                grad_weight = torch.empty_like(weight)
        if pending is not None:
            pending.wait()
        return grad_input, grad_weight, None, None, None


def quantize(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, layouts: str) -> Quantized:
    """Run the kernel, or on CPUs its reference."""
    if not x.is_cuda:
        return reference.quantize(x, amax, dtype, layouts)
    from gsa_kernels.fused.fp8.op import fused_quantize  # imports Triton

    return fused_quantize(x, amax, dtype, layouts)


def product(
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    a_unit: torch.Tensor,
    b_unit: torch.Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """Compute a [M, K] @ b [N, K]^T * a_unit * b_unit on the tensor cores, or on CPUs by the reference.

    Args:
        fast: accumulate in the registers of the tensor cores, which keep fewer bits than fp32.
    """
    assert a is not None
    assert b is not None
    if not a.is_cuda:
        return reference.product(a, b, a_unit, b_unit, dtype)
    return torch._scaled_mm(a, b.t(), scale_a=a_unit, scale_b=b_unit, out_dtype=dtype, use_fast_accum=fast)


def _gathered(shard: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather FP8 rows, as bytes, because the backends lack FP8."""
    assert shard is not None
    whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(whole.view(torch.uint8), shard.view(torch.uint8), group=group)
    return whole
