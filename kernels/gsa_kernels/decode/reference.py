"""Defines decoding: one new query per sequence selects from a cache of keys and attends to the selected keys.

The code calls reference prefill operations with one query row. Cache entries at positions >= `lengths` may hold
anything, including NaN.
"""

from dataclasses import asdict, dataclass, replace

import torch

from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.decode.state import DecodeSelection
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.indexer.reference import scores_of
from gsa_kernels.selection.budget import adaptive_budget, score_moments
from gsa_kernels.selection.reference import select_top_k
from gsa_kernels.types import BudgetRule, Indexer


@dataclass(frozen=True)
class DecodeTopK:
    """Holds what one query per sequence selects, and the scores and statistics that decide it."""

    scores: torch.Tensor
    """[B, L_max], indexer scores; unspecified from the sequence's length on."""

    variance: torch.Tensor
    """[B]: population variance of the scores over the sequence's keys."""

    budget: torch.Tensor
    """int64 [B]: k_t."""

    selected: torch.Tensor
    """bool [B, L_max]: the top-k, without the local window."""


def decode_top_k(
    indexer: Indexer,
    lengths: torch.Tensor,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
) -> DecodeTopK:
    """Select the k_t keys with the highest indexer scores among the first `lengths` keys. Ties go to the lower index.

    Args:
        indexer: queries [B, 1, HI, DI] and head weight logits [B, 1, HI] of the tokens at position lengths - 1; keys
            [B, L_max, DI], the cache
        lengths: int [B], tokens of each sequence, including the new one; 0 for an unused slot
        variance_ema: 0-d, the layer's frozen moving average
    """
    check_shape("indexer.queries", indexer.queries, "[B, 1, HI, DI]", (None, 1, None, None))
    batch, max_length = indexer.keys.shape[:2]
    causal = _causal(lengths, batch, max_length)
    keys = indexer.keys.masked_fill(~causal[..., None], 0.0)
    scores = scores_of(replace(indexer, keys=keys))
    _, variance = score_moments(scores, causal[:, None])
    budget = adaptive_budget(variance, variance_ema, causal.sum(-1)[:, None], **asdict(rule))
    selected = select_top_k(scores, causal[:, None], budget)
    return DecodeTopK(scores[:, 0], variance[:, 0], budget[:, 0], selected[:, 0])


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    selected: torch.Tensor,
    *,
    local_window: int = 0,
    output_gate_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the token at lengths - 1 to its selection and the last `local_window` keys, gated by G1.

    Args:
        q: [B, H, D]
        k: [B, L_max, Hkv, D], the cache
        v: [B, L_max, Hkv, D], the cache
        lengths: int [B]
        selected: bool [B, L_max]
        local_window: number of keys, including the query's own
        output_gate_logits: [B, H, D], G1 before its sigmoid

    Returns:
        [B, H, D] in the dtype of v; zeros for a sequence of length 0.
    """
    check_shape("q", q, "[B, H, D]", (None, None, None))
    check_shape("k", k, "[B, L_max, Hkv, D]", (q.shape[0], None, None, q.shape[2]))
    batch, max_length = k.shape[:2]
    check_shape("selected", selected, "[B, L_max]", (batch, max_length))
    check_at_least("local_window", local_window, 0)
    causal = _causal(lengths, batch, max_length)
    mask = keys_of_selection(selected, lengths, local_window) & causal
    unused = ~causal[..., None, None]
    out = sparse_attention(
        q[:, None],
        k.masked_fill(unused, 0.0),
        v.masked_fill(unused, 0.0),
        mask[:, None],
    ).out[:, 0]
    return out if output_gate_logits is None else sigmoid_gate(out, output_gate_logits)


def keys_of_selection(selected: torch.Tensor, lengths: torch.Tensor, local_window: int) -> torch.Tensor:
    """Add the local window to the selected keys: bool [B, L_max], unspecified from the sequence's length on."""
    keys = torch.arange(selected.shape[1], device=selected.device)
    return selected | (lengths[:, None] - 1 - keys < local_window)


def decoded_keys(
    selection: DecodeSelection, lengths: torch.Tensor, local_window: int, num_keys: int
) -> torch.Tensor:
    """Return the keys to which each sequence's last token attended when it was decoded: bool [B, num_keys]. Entries at
    or beyond the length of a sequence are unspecified."""
    valid = torch.arange(selection.indices.shape[1], device=lengths.device) < selection.counts[:, None]
    hits = torch.zeros(len(valid), num_keys, dtype=torch.int32, device=lengths.device)
    hits.scatter_add_(1, torch.where(valid, selection.indices, 0).long(), valid.int())
    return keys_of_selection(hits > 0, lengths, local_window)


def _causal(lengths: torch.Tensor, batch: int, max_length: int) -> torch.Tensor:
    """Return bool [B, L_max]: the sequence's tokens."""
    check_shape("lengths", lengths, "[B]", (batch,))
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]
