"""Computes exact attention over a selected set of keys in plain torch (GSA, equations 11 and 12)."""

from dataclasses import dataclass

import torch

from gsa_kernels.checks import check_head_counts, check_mask, check_shape, compute_dtype


@dataclass(frozen=True)
class AttentionOutput:
    """Holds the attention output and optional statistics, which are detached."""

    out: torch.Tensor
    """[B, Lq, H, Dv], in the dtype of v."""

    head_sum_probs: torch.Tensor | None = None
    """[B, Lq, Lk], fp32 (fp64 for fp64 inputs): probabilities summed over the heads given."""

    recall: torch.Tensor | None = None
    """[B, Lq, H]: share of the dense attention probability that falls on the mask."""

    lse: torch.Tensor | None = None
    """[B, H, Lq], fp32 (fp64 for fp64 inputs): log sum_{s in S_t} exp(q[t] . k[s] / sqrt(D)), -inf for a row whose mask
    is empty."""


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    recall_among: torch.Tensor | None = None,
    return_probs: bool = False,
    return_lse: bool = False,
) -> AttentionOutput:
    """Compute out[t] = sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] / sqrt(D)) v[s], per head.

    Query head h reads key-value head h // (H / Hkv). To compute dense attention, pass a mask that selects all causal
    keys. If the mask of a row is empty, the output of the row is 0.

    Args:
        q: [B, Lq, H, D]
        k: [B, Lk, Hkv, D]
        v: [B, Lk, Hkv, Dv]
        mask: bool [B or 1, Lq, Lk], S_t
        recall_among: bool [B or 1, Lq, Lk], the causal keys, for `AttentionOutput.recall`
    """
    check_shape("q", q, "[B, Lq, H, D]", (None, None, None, None))
    batch, num_queries, heads, dim = q.shape
    check_shape("k", k, "[B, Lk, Hkv, D]", (batch, None, None, dim))
    num_keys, kv_heads = k.shape[1], k.shape[2]
    check_shape("v", v, "[B, Lk, Hkv, Dv]", (batch, num_keys, kv_heads, None))
    check_head_counts(heads, kv_heads)
    check_mask("mask", mask, batch, num_queries, num_keys)
    if recall_among is not None:
        check_mask("recall_among", recall_among, batch, num_queries, num_keys)

    dtype = compute_dtype(q=q, k=k, v=v)
    logits = _logits(q.to(dtype), k.to(dtype), dim**-0.5)
    mask = mask[:, None, None]
    probs = _softmax(logits, mask)
    out = torch.einsum("bgrqk,bkgd->bqgrd", probs, v.to(dtype)).flatten(2, 3).to(v.dtype)

    return AttentionOutput(
        out=out,
        head_sum_probs=probs.detach().sum((1, 2)) if return_probs else None,
        recall=None if recall_among is None else _recall(logits.detach(), mask, recall_among[:, None, None]),
        lse=_log_sum_exp(logits.detach(), mask) if return_lse else None,
    )


@torch.no_grad()
def head_sum_probs(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the attention probabilities exp(q[t, h] . k[s] / sqrt(D) - lse[h, t]) over heads h; 0 outside the mask.

    The result is the target of the indexer loss.

    Args:
        q: [B, Lq, H, D]
        k: [B, Lk, Hkv, D]
        lse: [B, H, Lq], from attention over the same mask
        mask: bool [B or 1, Lq, Lk]

    Returns:
        [B, Lq, Lk] in fp32 (fp64 for fp64 inputs)
    """
    batch, num_queries, heads, dim = q.shape
    check_shape("k", k, "[B, Lk, Hkv, D]", (batch, None, None, dim))
    check_shape("lse", lse, "[B, H, Lq]", (batch, heads, num_queries))
    check_mask("mask", mask, batch, num_queries, k.shape[1])
    dtype = compute_dtype(q=q, k=k)
    logits = _logits(q.to(dtype), k.to(dtype), dim**-0.5).flatten(1, 2)
    probs = (logits - lse.to(dtype)[..., None]).exp()
    return torch.where(mask[:, None], probs, 0).sum(1)


@torch.no_grad()
def attention_probs(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute softmax_{s in S_t}(q[t] . k[s] / sqrt(D)): [B, H, Lq, Lk] in fp32 (fp64 for fp64 inputs).

    Keys that the mask does not select get 0.

    Args:
        q: [B, Lq, H, D]
        k: [B, Lk, Hkv, D]
        mask: bool [B or 1, Lq, Lk], S_t
    """
    batch, num_queries, _, dim = q.shape
    check_shape("k", k, "[B, Lk, Hkv, D]", (batch, None, None, dim))
    check_mask("mask", mask, batch, num_queries, k.shape[1])
    dtype = compute_dtype(q=q, k=k)
    return _softmax(_logits(q.to(dtype), k.to(dtype), dim**-0.5), mask[:, None, None]).flatten(1, 2)


def _softmax(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the softmax over the keys that the mask selects. Other keys get probability 0. In a row with an empty
    mask, all keys get 0."""
    # A row with an empty mask is normalised over all keys and then zeroed. This keeps the backward pass finite, too.
    normalised_over = mask | ~mask.any(-1, keepdim=True)
    return logits.masked_fill(~normalised_over, float("-inf")).softmax(-1).masked_fill(~mask, 0.0)


def _logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the logits [B, Hkv, H / Hkv, Lq, Lk]."""
    kv_heads = k.shape[2]
    # The einsum index g is the key-value head; r is the query head within its group.
    grouped = q.unflatten(2, (kv_heads, q.shape[2] // kv_heads))
    return torch.einsum("bqgrd,bkgd->bgrqk", grouped, k) * scale


def _log_sum_exp(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, H / Hkv, Lq, Lk] -> [B, H, Lq]"""
    return logits.masked_fill(~mask, float("-inf")).logsumexp(-1).flatten(1, 2)


def _recall(logits: torch.Tensor, mask: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Return how much of dense attention's probability falls on selected keys, exp(lse of selected keys - lse of causal
    keys): [B, Hkv, H / Hkv, Lq, Lk] -> [B, Lq, H]."""
    selected, whole = _log_sum_exp(logits, mask & causal), _log_sum_exp(logits, causal)
    empty = ~causal.any(-1).flatten(1, 2)
    return (selected - whole).exp().masked_fill(empty, 0.0).transpose(1, 2)
