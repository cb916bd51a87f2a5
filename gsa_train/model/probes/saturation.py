"""What tends to grow before the loss does: attention logits, and indexer scores that no gradient moves any more.

Of few queries (`QuerySample.sparse`) against all their causal keys, in logged steps alone: 32 queries of a sequence of
4096 are 1.6% of its pairs, and one product of each instead of the seven of attention, forward and backward.
"""

from __future__ import annotations

import math

import torch

from gsa_kernels.types import Indexer
from gsa_train.model.probes.measured_queries import MeasuredQueries
from gsa_train.model.probes.stats import Statistics

FLAT_SLOPE = 0.01
"""Slope sigma (1 - sigma) below which a sigmoid counts as saturated: a 25th of its largest."""
_ROOT = math.sqrt(1 - 4 * FLAT_SLOPE)
FLAT_FROM = math.log((1 + _ROOT) / (1 - _ROOT))
"""|z| above which sigma(z) has less slope than that."""


@torch.no_grad()
def saturation_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    indexer: Indexer | None,
    queries: MeasuredQueries,
    candidates: torch.Tensor | None = None,
) -> Statistics:
    """Largest logit and saturated share of the sparse queries with at least two causal keys.

    Args:
        indexer: of all queries; None where the layer has none.
        candidates: bool [B, T, L_k], what the indexer scores where that is not all causal keys.
    """
    rows, sparse = queries.sample.sparse, queries.sparse
    logit = largest_logit(q[:, rows], k, sparse.causal_with_choice)
    statistics = Statistics(maxima={"max_attention_logit": logit})
    if indexer is not None:
        asked, scores = indexer.queries[:, rows], (indexer.score_bias, indexer.activation)
        if candidates is None:
            scored, counted = (sparse.causal_as(asked.dtype), sparse.visible), sparse.has_choice
        else:
            scored = (candidates.to(asked.dtype), candidates.sum(-1).clamp(min=1))
            counted = candidates.any(-1)
        share = saturated_share(asked, indexer.keys, *scores, scored)
        statistics.average("indexer_saturated", share, counted[..., None])
    return statistics


def largest_logit(q: torch.Tensor, k: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """max over heads, queries t and causal keys s of q[t] . k[s] / sqrt(d_k), 0-d.

    Args:
        q: [B, T, n_h, d_k]
        k: [B, L_k, n_kv, d_k]
        causal: bool [B, T, L_k] or [1, T, L_k]
    """
    kv_heads, head_dim = k.shape[2:]
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, n_kv, n_h / n_kv, T, d_k]
    logits = grouped.flatten(2, 3) @ k.permute(0, 2, 3, 1)
    # Over the heads first, which see the same keys: [B, T, L_k].
    of_heads = logits.unflatten(2, grouped.shape[2:4]).amax((1, 2))
    return of_heads.masked_fill_(~causal, -torch.inf).amax() * head_dim**-0.5


def saturated_share(
    queries: torch.Tensor,
    keys: torch.Tensor,
    score_bias: torch.Tensor | None,
    activation: str,
    causal: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Share of the keys of each query and indexer head where the activation (eq. 7) has no slope to speak of: fp32
    [B, T, H_I].

    Args:
        queries: [B, T, H_I, d_I]
        keys: [B, L_k, d_I]
        score_bias: b_j [H_I]
        activation: `sigmoid`, saturated below and above, or `relu`, below 0.
        causal: the keys that each query sees, ones and zeros [B, T, L_k] in the type of the queries, and how many these
            are, [B, T]; or of B = 1
    """
    seen, number = causal
    scaled = (queries * queries.shape[-1] ** -0.5).flatten(1, 2)
    z = (scaled @ keys.transpose(1, 2)).unflatten(1, queries.shape[1:3])  # [B, T, H_I, L_k]
    if score_bias is not None:
        z += score_bias[:, None]
    assert activation in ("sigmoid", "relu"), f"when has {activation} no slope?"
    flat = z <= 0 if activation == "relu" else z.abs_() > FLAT_FROM
    # A product in the type of z: a sum of bools copies them to int64 first.
    return (flat * seen[:, :, None]).sum(-1, dtype=torch.float32) / number[..., None]
