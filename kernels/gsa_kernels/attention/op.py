"""Attention over the selected keys with fused gate G1: the operation that the Triton kernels serve."""

import torch

from gsa_kernels.attention.triton_backward import attention_backward
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.devices import interpreted
from gsa_kernels.fused.gates.rows import grouped
from gsa_kernels.limits import HEAD_SIZES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor | None = None,
    *,
    document_starts: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    output_gate_logits: torch.Tensor | None = None,
    query_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] * scale) v[s], times sigmoid(gate), per head.

    Query head h reads key-value head h // (H / Hkv). Differentiable in q, k, v and output_gate_logits; the
    backward pass is deterministic. Any strides, the last dimension contiguous.

    Args:
        q: [B, L, H, D], D 32, 64 or 128; bf16, fp16 or fp32
        k: [B, Lk, Hkv, D], Lk = query_start + L
        v: [B, Lk, Hkv, D]
        words: S_t as bits, int32 [B, L, ceil(Lk / 32)]: bit s % 32 of word s // 32 in row i says that query i
            selects s, and s is visible to it. None: dense causal attention.
        document_starts: int32 [B, L], never decreasing: key s is visible to query i, at position t, if
            document_starts[b, i] <= s <= t. None: one document. Beside words it only saves work.
        softmax_scale: positive; 1 / sqrt(D) if None
        output_gate_logits: [B, L, H, D] or [B, L, Hkv, H / Hkv, D], G1 before its sigmoid
        query_start: position of the first query; query i stands at t = query_start + i, key s at s

    Returns:
        out: [B, L, H, D], in the dtype and the memory order of q
        lse: fp32 [B, H, L], log sum_{s in S_t} exp(logit), without gradient
    """
    scale = check_attention(q, k, v, words, document_starts, softmax_scale, output_gate_logits, query_start)
    if document_starts is not None:
        document_starts = document_starts.contiguous()
    gate_logits = grouped(output_gate_logits, k.shape[2])
    return _MaskedAttention.apply(q, k, v, gate_logits, words, document_starts, scale)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate_logits, words, document_starts, scale):  # type: ignore[no-untyped-def]
        out, lse = attention_forward(q, k, v, words, document_starts, gate_logits, scale)
        ctx.save_for_backward(q, k, v, gate_logits, words, document_starts, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        q, k, v, gate_logits, words, document_starts, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v, grad_gate = attention_backward(
            grad, q, k, v, out, lse, words, document_starts, gate_logits, ctx.scale
        )
        return grad_q, grad_k, grad_v, grad_gate, None, None, None


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    softmax_scale: float | None,
    gate_logits: torch.Tensor | None,
    query_start: int = 0,
) -> float:
    """Raise ValueError for what the kernels cannot take; return the softmax scale."""
    check_shape("q", q, "[B, L, H, D]", (None, None, None, None))
    batch, length, heads, dim = q.shape
    check_at_least("query_start", query_start, 0)
    num_keys = query_start + length
    check_shape("k", k, "[B, query_start + L, Hkv, D]", (batch, num_keys, None, dim))
    kv_heads = k.shape[2]
    check_shape("v", v, "[B, query_start + L, Hkv, D]", (batch, num_keys, kv_heads, dim))
    if 0 in (batch, length, heads):
        raise ValueError(f"q has shape {tuple(q.shape)}; pass at least one sequence, token and head")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads and k has {kv_heads}; pass query heads in a multiple of k's")
    if dim not in HEAD_SIZES:
        raise ValueError(f"the head size is {dim}; pass one of {HEAD_SIZES}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; pass bfloat16, float16 or float32")
    floats = {"q": q, "k": k, "v": v}
    if gate_logits is not None:
        if gate_logits.ndim == 5:
            shape = (batch, length, kv_heads, heads // kv_heads, dim)
            check_shape("output_gate_logits", gate_logits, "[B, L, Hkv, H / Hkv, D]", shape)
        else:
            check_shape("output_gate_logits", gate_logits, "[B, L, H, D]", tuple(q.shape))
        floats["output_gate_logits"] = gate_logits
    integers = {}
    if words is not None:
        check_shape("words", words, "[B, L, ceil(Lk / 32)]", (batch, length, -(-num_keys // 32)))
        integers["words"] = words
    if document_starts is not None:
        check_shape("document_starts", document_starts, "[B, L]", (batch, length))
        integers["document_starts"] = document_starts
    for name, tensor in floats.items():
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; pass one dtype")
    for name, tensor in integers.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} has dtype {tensor.dtype}; pass int32")
    for name, tensor in (floats | integers).items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; pass one device")
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of {name} has stride {tensor.stride(-1)}; make it contiguous"
            )
    if q.device.type != "cuda" and not interpreted():
        raise ValueError(f"q is on {q.device}; pass CUDA tensors (or set TRITON_INTERPRET=1 to test on CPU)")
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not scale > 0:
        raise ValueError(f"softmax_scale is {scale}; pass a positive number")
    return scale
