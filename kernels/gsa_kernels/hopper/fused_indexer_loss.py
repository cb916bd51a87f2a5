"""Attention over selected keys whose backward pass gives the indexer's gradients, too.

By itself the loss needs the probabilities of attention once more, a product of queries and keys of all heads. The
backward pass calculates them for the gradient of q: it hands their sums over heads to the loss, tile by tile.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import profiler

from gsa_kernels.attention.op import check_attention
from gsa_kernels.attention.triton_backward import backward_rows
from gsa_kernels.attention.triton_backward_keys import backward_keys, key_tiles
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.checks import beta_tensor, check_at_least
from gsa_kernels.devices import on_hopper
from gsa_kernels.fused.gates.rows import grouped
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.indexer_loss.op import check_inputs, check_support, value_and_gradients
from gsa_kernels.limits import FUSED_LOSS_CHUNK_BYTES, FUSED_LOSS_HEADS
from gsa_kernels.sampling import SampledRows


class Settings(NamedTuple):
    """What is no tensor."""

    softmax_scale: float
    loss_scale: float
    activation: str
    query_start: int
    loss_chunk_bytes: int
    on_rows: Callable[[torch.Tensor], None] | None


def can_fuse_indexer_loss(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `attention_with_indexer_loss` takes q [B, L, H, D] and k [B, Lk, Hkv, D]: bf16 or fp16, a multiple of
    four heads for each of k's, on Hopper or in the interpreter."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] // k.shape[2] % FUSED_LOSS_HEADS == 0
        and on_hopper(q.device)
    )


def attention_with_indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    *,
    loss_scale: float,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    inverse_temperature: float | torch.Tensor = 1.0,
    log_sum: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    output_gate_logits: torch.Tensor | None = None,
    query_start: int = 0,
    row_chunk_bytes: int = FUSED_LOSS_CHUNK_BYTES,
    on_rows: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`masked_attention`, whose backward pass adds the gradients of loss_scale * `indexer_kl_loss` over the same words.

    The target is the sum over the heads of q, so all heads have to be there. It is fp16, each four heads rounded by
    themselves. Deterministic.

    Args:
        q, k, v, words, document_starts, softmax_scale, output_gate_logits, query_start: as in `masked_attention`;
            `can_fuse_indexer_loss` says of q and k whether they will do
        q_idx, k_idx, weight_logits, score_bias, weight_bias, activation, inverse_temperature, log_sum: as in
            `indexer_kl_loss`
        loss_scale: gradient with respect to the loss, which is not returned: it is known in the backward pass only
        row_chunk_bytes: size of a chunk of the target, H B Lk / 2 bytes a query; the loss takes about as much again.
            At least one tile of queries is calculated at a time
        on_rows: called in the backward pass with the KL of each query, fp32 [B, L], which is calculated for this only

    Returns:
        As `masked_attention`: out [B, L, H, D] and lse fp32 [B, H, L]
    """
    if words is None:
        raise ValueError("words is None; pass the selection, or use masked_attention and indexer_kl_loss")
    scale = check_attention(q, k, v, words, document_starts, softmax_scale, output_gate_logits, query_start)
    if not can_fuse_indexer_loss(q, k):
        raise ValueError(
            f"q is {q.dtype} with {q.shape[2]} heads and k has {k.shape[2]}; pass bf16 or fp16, "
            f"{FUSED_LOSS_HEADS} heads (or a multiple) for each of k's, on Hopper, or use masked_attention and "
            "indexer_kl_loss"
        )
    batch, _, length = check_inputs(
        q_idx, k_idx, weight_logits, score_bias, weight_bias, activation, 1, query_start
    )
    if (batch, length) != q.shape[:2]:
        raise ValueError(f"q_idx has shape {tuple(q_idx.shape)} and q {tuple(q.shape)}; pass equal B and L")
    check_support(words, document_starts, log_sum, (batch, length, length, query_start + length))
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)
    if document_starts is not None:
        document_starts = document_starts.contiguous()
    beta = beta_tensor(inverse_temperature, q.device)
    attended = (q, k, v, grouped(output_gate_logits, k.shape[2]))
    indexer = (q_idx, k_idx, weight_logits, score_bias, weight_bias, beta)
    # The loss counts four bytes for each query and key, and has two for each part.
    loss_chunk_bytes = max(2 * row_chunk_bytes // (q.shape[2] // FUSED_LOSS_HEADS), 1)
    settings = Settings(scale, loss_scale, activation, query_start, loss_chunk_bytes, on_rows)
    return _DistillingAttention.apply(*attended, *indexer, words, document_starts, log_sum, settings)


class _DistillingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Four tensors of attention and six of the indexer, of which some may be None; words, document_starts and
        log_sum; `Settings`."""
        *tensors, settings = arguments
        q, k, v, gate_logits = tensors[:4]
        words, document_starts, _ = tensors[10:]
        out, lse = attention_forward(q, k, v, words, document_starts, gate_logits, settings.softmax_scale)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        settings: Settings = ctx.settings
        q, k, v, gate_logits, *indexer, words, document_starts, log_sum, out, lse = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_attended, grad_gate, delta, lse2 = backward_rows(grad, out, lse, gate_logits)
        shared = (grad_attended, q, k, v, delta, lse2, words, document_starts, settings.softmax_scale)
        grad_k, grad_v = backward_keys(*shared, key_tiles(q.shape[3], q.dtype))
        grad_q = torch.empty_like(q)

        def target_rows(rows: SampledRows) -> torch.Tensor:
            with _traced("attention"):
                ends = rows.start, rows.start + rows.count
                return backward_queries_with_target(*shared, grad_q, range(*ends))

        with _traced("kl"):
            _, kl_rows, gradients = value_and_gradients(
                *indexer,
                target_rows=target_rows,
                activation=settings.activation,
                words=words,
                # Each head's probabilities sum to 1 over the words, those of its log-sum-exp.
                target_sum=float(q.shape[2]),
                log_sum=log_sum,
                document_starts=document_starts,
                selection_block=1,
                query_start=settings.query_start,
                row_chunk_bytes=settings.loss_chunk_bytes,
                sample=SampledRows(0, q.shape[1]),
                blocks=None,
                with_gradients=True,
                with_value=settings.on_rows is not None,
                gradient_scale=settings.loss_scale,
            )
            if settings.on_rows is not None:
                assert kl_rows is not None
                settings.on_rows(kl_rows)
        return grad_q, grad_k, grad_v, grad_gate, *gradients, *(None,) * 4


def _traced(name: str) -> AbstractContextManager[object]:
    """A part of the backward pass in a profiler's trace, where the loss would count to attention; else nothing."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()
