"""Implement megatron-core's parallel linear layers with FP8 products (`train.linear_layers: fp8`).

Inputs and weights are rounded to E4M3, and gradients to E5M2. Each matrix is scaled by its own largest magnitude
(current scaling). A layer's only state is its bf16 weight. Tensor-parallel ranks use the largest magnitude of the whole
matrix, so sharding does not change the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from gsa_kernels.fused.fp8 import reference
from gsa_kernels.fused.fp8.reference import E4M3, E5M2, Quantized, with_same_largest


class Fp8ColumnLinear(ColumnParallelLinear):
    shards_output = True
    """Each rank has columns of the output and of its gradient."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        exchanges = options["sequence_parallel"], options["allreduce_dgrad"]
        output = _Fp8Product.apply(input, weight, self, torch.is_grad_enabled(), *exchanges)
        return output if options["bias"] is None else output + options["bias"]


class Fp8RowLinear(RowParallelLinear):
    shards_output = False

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        return _Fp8Product.apply(input, weight, self, torch.is_grad_enabled(), False, False)


class _Fp8Product(torch.autograd.Function):
    """Computes x W^T.

    Args of `apply`:
        layer: one of the classes above.
        learns: a backward pass may follow.
        gathers: gather the tokens of the input, and reduce-scatter its gradient (sequence parallelism).
        reduces: sum the input's gradient over the tensor-parallel ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        layer: Any,
        learns: bool,
        gathers: bool,
        reduces: bool,
    ) -> torch.Tensor:
        ctx.shape, ctx.layer, ctx.gathers, ctx.reduces = inputs.shape, layer, gathers, reduces
        keeps, needs_grad = (learns and needed for needed in ctx.needs_input_grad[1::-1])
        # The maximum over ranks does not change the value of an input that all ranks have.
        x, w = quantize((inputs, weight), E4M3, (keeps and not gathers, needs_grad), layer.tp_group)
        kept = (x.rows if gathers else x.columns) if keeps else None
        ctx.save_for_backward(kept, x.inverse_scale, w.columns, w.inverse_scale, weight)
        rows = x.rows
        if gathers:
            rows, pending = _gather(x.rows, layer.tp_group)
            pending.wait()
        output = product(rows, w.rows, x.inverse_scale, w.inverse_scale, inputs.dtype, fast=True)
        return output.view(-1, *inputs.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, x_inverse_scale, w_columns, w_inverse_scale, weight = ctx.saved_tensors
        layer, group = ctx.layer, ctx.layer.tp_group
        (g,) = quantize((grad_output,), E5M2, (kept is not None,), group if layer.shards_output else None)
        grad_input = grad_weight = pending = arriving = None
        if kept is not None and ctx.gathers:  # overlaps with the computation of the input gradient
            kept, arriving = _gather(kept, group)
        if w_columns is not None:
            grad_input = whole = product(
                g.rows, w_columns, g.inverse_scale, w_inverse_scale, grad_output.dtype
            ).view(-1, *ctx.shape[1:])
            # The reduction overlaps with the computation of the weight gradient.
            if ctx.gathers:
                grad_input = whole.new_empty(ctx.shape)
                pending = dist.reduce_scatter_tensor(grad_input, whole, group=group, async_op=True)
            elif ctx.reduces:
                pending = dist.all_reduce(grad_input, group=group, async_op=True)
        if kept is not None and g.columns is not None:
            if arriving is not None:
                arriving.wait()
                kept = kept.t().contiguous()  # frees the rows
            accumulates = layer.gradient_accumulation_fusion
            dtype = torch.float32 if accumulates else weight.dtype
            grad_weight = product(g.columns, kept, g.inverse_scale, x_inverse_scale, dtype)
            if accumulates:  # as in grad_accumulation_fusion.weight_gradient
                weight.main_grad.add_(grad_weight)
                weight.grad_added_to_main_grad = True
                grad_weight = torch.empty_like(weight)
        if pending is not None:
            pending.wait()
        return grad_input, grad_weight, None, None, None, None


def quantize(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    transposes: Sequence[bool],
    group: dist.ProcessGroup | None,
) -> list[Quantized]:
    """Quantize one or two matrices.

    Args:
        tensors: [..., K]
        transposes: for each matrix, whether to also return the transpose
        group: ranks with shards of the matrices
    """
    find, cast = operations(tensors[0].is_cuda)
    tensors = [x.contiguous() for x in tensors]
    bits = find(*map(with_same_largest, tensors))
    if group is not None and group.size() > 1:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return cast([x.flatten(0, -2) for x in tensors], bits, dtype, transposes)


def operations(on_gpu: bool) -> tuple[Callable[..., torch.Tensor], Callable[..., list[Quantized]]]:
    """Return `magnitudes` and `quantize`: GPU kernels, or the CPU reference."""
    if not on_gpu:
        return reference.magnitudes, reference.quantize
    from gsa_kernels.fused.fp8.op import fused_magnitudes, fused_quantize  # imports Triton

    return fused_magnitudes, fused_quantize


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inverse_scale: torch.Tensor,
    b_inverse_scale: torch.Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """Compute a [M, K] @ b [N, K]^T times both inverse scales. CPUs run the reference implementation.

    Args:
        fast: accumulate in the tensor cores' registers, which keep fewer bits than fp32.
    """
    if not a.is_cuda:
        return reference.product(a, b, a_inverse_scale, b_inverse_scale, dtype)
    return torch._scaled_mm(
        a, b.t(), scale_a=a_inverse_scale, scale_b=b_inverse_scale, out_dtype=dtype, use_fast_accum=fast
    )


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """All-gather FP8 rows, as bytes, because the backends lack FP8. Return them and the collective to wait for."""
    whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    as_bytes = whole.view(torch.uint8), shard.view(torch.uint8)
    return whole, dist.all_gather_into_tensor(*as_bytes, group=group, async_op=True)
