"""Computes attention over selected keys with fused output gate G1 by Triton kernels."""

import torch

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.inputs import ALL_OF_ONE_SEQUENCE, AttentionInputs, checked_inputs
from gsa_kernels.attention.triton_backward import attention_backward
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.checks import check_differentiated_once
from gsa_kernels.devices import launching_on
from gsa_kernels.types import Geometry, Selection


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry,
    gate_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `api.sparse_attention` over the selection's packed mask or key lists."""
    with launching_on(q, "q"):
        if selection is not None and selection.key_lists is not None:
            return gathered_attention(q, k, v, selection.key_lists, gate_logits)
        packed_mask = None if selection is None else selection.packed_mask
        return masked_attention(q, k, v, packed_mask, geometry, gate_logits)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed_mask: torch.Tensor | None = None,
    geometry: Geometry = ALL_OF_ONE_SEQUENCE,
    gate_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out[t] = sigmoid(gate) * sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] / sqrt(D)) v[s], per head.

    Query head h reads key-value head h // (H / Hkv). The function is deterministic, and differentiable in q, k, v and
    gate_logits. The last dimension of each tensor must be contiguous.

    Args:
        q: [B, L, H, D], D one of limits.HEAD_SIZES; bf16 or fp32
        k: [B, Lk, Hkv, D], Lk = query_start + L
        v: [B, Lk, Hkv, D]
        packed_mask: S_t, int32 [B, L, ceil(Lk / 32)]: bit s % 32 of word s // 32 in row i says that query i selects
            key s, which is one of its causal keys. None: attention to all causal keys of the document.
        geometry: document starts and query start. With a packed mask, document starts only save work.
        gate_logits: [B, L, H, D] or [B, L, Hkv, H / Hkv, D], G1 before its sigmoid

    Returns:
        out: [B, L, H, D], in the dtype and the memory order of q
        lse: fp32 [B, H, L], log sum_{s in S_t} exp(logit), without gradient
    """
    starts = geometry.document_starts
    inputs = checked_inputs(
        q, k, v, gate_logits, geometry.query_start, packed_mask=packed_mask, document_starts=starts
    )
    if starts is not None:
        starts = starts.contiguous()
    return _MaskedAttention.apply(q, k, v, inputs.gate_logits, packed_mask, starts)


@torch.no_grad()
def sampled_lse(q: torch.Tensor, k: torch.Tensor, packed_mask: torch.Tensor) -> torch.Tensor:
    """Compute the log-sum-exp of `masked_attention` for S sampled queries: fp32 [B, H, S].

    Args:
        q: [B, S, H, D], D one of limits.HEAD_SIZES; bf16 or fp32; in any order, with repetitions
        k: [B, Lk, Hkv, D]
        packed_mask: int32 [B, S, ceil(Lk / 32)]: bit s % 32 of word s // 32 in row i says that key s counts for query i
    """
    inputs = checked_inputs(q, k, k, None, None, packed_mask=packed_mask)  # the sums do not read the values
    with launching_on(q, "q"):
        return attention_forward(inputs, packed_mask, None, anywhere=True)[1]


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate_logits, packed_mask, document_starts):  # type: ignore[no-untyped-def]
        inputs = AttentionInputs(q, k, v, gate_logits)
        out, lse = attention_forward(inputs, packed_mask, document_starts)
        ctx.save_for_backward(q, k, v, gate_logits, packed_mask, document_starts, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        check_differentiated_once()
        q, k, v, gate_logits, packed_mask, document_starts, out, lse = ctx.saved_tensors
        inputs = AttentionInputs(q, k, v, gate_logits)
        return *attention_backward(grad, inputs, out, lse, packed_mask, document_starts), None, None
