"""Computes attention over key lists, fused with the output gate G1. A key list holds every key that any query in a tile
of neighbouring queries selects."""

from dataclasses import replace

import torch

from gsa_kernels.attention.inputs import AttentionInputs, checked_inputs
from gsa_kernels.attention.triton_gathered_backward import gathered_backward
from gsa_kernels.attention.triton_gathered_forward import gathered_forward
from gsa_kernels.checks import check_at_least, check_differentiated_once, check_layout, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import GATHERED_GRADIENT_BYTES, TILE_QUERIES


def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: KeyLists,
    gate_logits: torch.Tensor | None = None,
    *,
    scratch_bytes: int = GATHERED_GRADIENT_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out[t] = sigmoid(gate) * sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] / sqrt(D)) v[s], per head.

    Each tile of queries gathers every key of its list once, so the work grows with the length of the lists. Every query
    must select at least one key. The function does not check that the listed keys are causal and belong to the document
    of the query. It is deterministic, and differentiable in q, k, v and gate_logits. The last dimension of each tensor
    must be contiguous.

    Args:
        q: [B, L, H, D], D one of limits.HEAD_SIZES; bf16 or fp32
        k: [B, Lk, Hkv, D], Lk = lists.num_keys
        v: [B, Lk, Hkv, D]
        lists: the keys S_t of the queries; the first query is at position lists.query_start
        gate_logits: [B, L, H, D] or [B, L, Hkv, H / Hkv, D], G1 before its sigmoid
        scratch_bytes: memory for partial sums in the backward pass, in addition to the fp32 gradients of k and v. A
            smaller limit makes the backward pass slower.

    Returns:
        out: [B, L, H, D], in the dtype and the memory order of q
        lse: fp32 [B, H, L], log sum_{s in S_t} exp(logit), without gradient
    """
    inputs = checked_inputs(q, k, v, gate_logits, lists.query_start)
    check_key_lists(lists, q)
    check_at_least("scratch_bytes", scratch_bytes, 1)
    return _GatheredAttention.apply(q, k, v, inputs.gate_logits, lists, scratch_bytes)


_LIST_TENSORS = ("keys", "words", "starts", "counts")
"""Fields of `KeyLists` that are tensors on the device."""


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate_logits, lists, scratch_bytes):  # type: ignore[no-untyped-def]
        out, lse = gathered_forward(AttentionInputs(q, k, v, gate_logits), lists)
        # The backward pass frees saved tensors. Attributes of ctx would occupy memory while the loss is referenced.
        ctx.save_for_backward(
            q, k, v, gate_logits, out, lse, *(getattr(lists, name) for name in _LIST_TENSORS)
        )
        ctx.lists = replace(lists, **dict.fromkeys(_LIST_TENSORS))
        ctx.scratch_bytes = scratch_bytes
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        check_differentiated_once()
        q, k, v, gate_logits, out, lse, *saved = ctx.saved_tensors
        lists = replace(ctx.lists, **dict(zip(_LIST_TENSORS, saved, strict=True)))
        inputs = AttentionInputs(q, k, v, gate_logits)
        return *gathered_backward(grad, inputs, out, lse, lists, ctx.scratch_bytes), None, None


def check_key_lists(lists: KeyLists, q: torch.Tensor) -> None:
    """Raise ValueError for lists that do not belong to the sequences of q."""
    batch, length = q.shape[:2]
    if lists.length != length:
        raise ValueError(f"lists are of {lists.length} tokens and q of {length}; pass lists of q's sequences")
    per_tile = (batch, -(-length // TILE_QUERIES))
    fields = {
        "keys": (lists.keys, torch.int32, (None,)),
        "words": (lists.words, torch.int32, (None,)),
        "starts": (lists.starts, torch.int64, per_tile),
        "counts": (lists.counts, torch.int32, per_tile),
    }
    for name, (tensor, dtype, shape) in fields.items():
        check_shape(f"lists.{name}", tensor, "[B, T]" if len(shape) == 2 else "[entries]", shape)
        check_layout(f"lists.{name}", tensor, dtype, q.device)
