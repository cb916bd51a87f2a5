"""Computes attention over selected keys. The backward pass also computes the gradients of the indexer loss.

The target of the indexer loss is a sum of attention probabilities over heads. The kernel for the
gradient of q needs these probabilities anyway, so it also writes their sums. A separate kernel for the loss would have
to compute the probabilities again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import profiler

from gsa_kernels.attention.inputs import AttentionInputs, GradientInputs, checked_inputs
from gsa_kernels.attention.triton_backward import backward_rows
from gsa_kernels.attention.triton_backward_keys import backward_keys
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.checks import check_at_least, check_differentiated_once
from gsa_kernels.devices import launching_on, on_hopper
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.limits import FUSED_LOSS_CHUNK_BYTES, FUSED_LOSS_HEADS
from gsa_kernels.loss.autograd import check_indexer, indexer_of, tensors_of
from gsa_kernels.loss.op import Attended, Target, Wanted, check_attended, value_and_gradients
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import FusedLoss, Geometry, Selection


class Settings(NamedTuple):
    """Holds those arguments of the autograd function that are not tensors."""

    loss_scale: torch.Tensor
    """fp32 of one element."""
    activation: Literal["sigmoid", "relu"]
    geometry: Geometry
    """The geometry without its document starts, which are passed as a tensor."""
    loss_chunk_bytes: int
    on_rows: Callable[[torch.Tensor], None] | None


def can_fuse_indexer_loss(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether `attention_with_indexer_loss` supports q [B, L, H, D] and k [B, Lk, Hkv, D]."""
    return (
        q.dtype == torch.bfloat16 and q.shape[2] // k.shape[2] % FUSED_LOSS_HEADS == 0 and on_hopper(q.device)
    )


def attention_with_indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection,
    geometry: Geometry,
    loss: FusedLoss,
    gate_logits: torch.Tensor | None = None,
    row_chunk_bytes: int = FUSED_LOSS_CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `masked_attention`. The backward pass adds the gradients of loss.scale * `triton_indexer_loss`.

    Attention and loss use the same packed mask. q must have all heads of the layer, because the target sums over all
    heads. The target is stored in fp16, as sums over four heads. The function is deterministic.

    Args:
        q, k, v, geometry, gate_logits: as in `masked_attention`; `can_fuse_indexer_loss` must accept q and k
        selection: a packed mask, optionally with the log-sum of the scores over it
        loss: its `on_rows` is called in the backward pass with the KL of each row, fp32 [B, L], which is computed only
            if `on_rows` is set
        row_chunk_bytes: size of a chunk of the target, H B Lk / 2 bytes per query. The loss needs about the same amount
            again. A chunk has at least one tile of rows.

    Returns:
        As in `masked_attention`: out [B, L, H, D] and lse fp32 [B, H, L]
    """
    packed_mask, starts, indexer = selection.packed_mask, geometry.document_starts, loss.indexer
    if packed_mask is None:
        raise ValueError("selection has key lists; pass a packed mask, or calculate the loss by indexer_loss")
    inputs = checked_inputs(
        q, k, v, gate_logits, geometry.query_start, packed_mask=packed_mask, document_starts=starts
    )
    if not can_fuse_indexer_loss(q, k):
        raise ValueError(
            f"q is {q.dtype} with {q.shape[2]} heads and k has {k.shape[2]}; pass bf16 and {FUSED_LOSS_HEADS} heads "
            "(or a multiple) for each of k's, on Hopper, or calculate the loss by indexer_loss"
        )
    batch, length = check_indexer(indexer, geometry.query_start)
    if (batch, length) != q.shape[:2]:
        raise ValueError(
            f"indexer.queries has shape {tuple(indexer.queries.shape)} and q {tuple(q.shape)}; pass equal B and L"
        )
    attended = Attended(packed_mask, selection.log_sum, geometry)
    check_attended(attended, (batch, length, geometry.query_start + length))
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)
    if starts is not None:
        starts = starts.contiguous()
    # The loss counts four bytes per row and key. The target has two bytes per part, row and key.
    loss_chunk_bytes = max(2 * row_chunk_bytes // (q.shape[2] // FUSED_LOSS_HEADS), 1)
    scale = loss.scale
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((1,), scale, dtype=torch.float32, device=q.device)
    without_starts = replace(geometry, document_starts=None)
    settings = Settings(scale, indexer.activation, without_starts, loss_chunk_bytes, loss.on_rows)
    with launching_on(q, "q"):
        return _AttentionWithLoss.apply(
            q,
            k,
            v,
            inputs.gate_logits,
            *tensors_of(indexer),
            packed_mask,
            starts,
            selection.log_sum,
            settings,
        )


class _AttentionWithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take four tensors of attention, six of the indexer, packed mask, document starts, log-sum and `Settings`."""
        *tensors, settings = arguments
        packed_mask, document_starts, _ = tensors[10:]
        out, lse = attention_forward(AttentionInputs(*tensors[:4]), packed_mask, document_starts)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once()
        settings: Settings = ctx.settings
        q, k, v, gate_logits, *of_indexer, packed_mask, document_starts, log_sum, out, lse = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_attended, grad_gate, delta, lse2 = backward_rows(grad, out, lse, gate_logits)
        shared = GradientInputs(grad_attended, q, k, v, delta, lse2)
        grad_k, grad_v = backward_keys(shared, packed_mask, document_starts)
        grad_q = torch.empty_like(q)

        geometry = replace(settings.geometry, document_starts=document_starts)

        def target_rows(rows: SampledRows) -> torch.Tensor:
            queries = range(rows.start, rows.start + rows.count)
            with _traced("attention"):
                return backward_queries_with_target(shared, packed_mask, document_starts, grad_q, queries)

        with _traced("kl"):
            _, kl_rows, gradients = value_and_gradients(
                indexer_of(of_indexer, settings.activation),
                # Each head's probabilities sum to 1 over the keys of its log-sum-exp.
                Target(target_rows, float(q.shape[2])),
                Attended(packed_mask, log_sum, geometry),
                SampledRows(0, q.shape[1]),
                Wanted(True, settings.on_rows is not None, settings.loss_scale),
                settings.loss_chunk_bytes,
            )
            if settings.on_rows is not None:
                assert kl_rows is not None
                settings.on_rows(kl_rows)
        return grad_q, grad_k, grad_v, grad_gate, *gradients, *(None,) * 4


def _traced(name: str) -> AbstractContextManager[object]:
    """Mark a part of the backward pass for a profiler, which would otherwise count the loss as attention."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()
