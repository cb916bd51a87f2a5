"""Measure early signs of divergence: large attention logits, and indexer scores in flat regions of their activation.

Logged steps score a few sampled queries (`QuerySample.sparse`) against all their causal keys. The results are the
largest attention logit, and the share of keys where the indexer's activation has little or no slope.
"""

from __future__ import annotations

import math

import torch

from gsa_kernels.types import Indexer
from gsa_train.model.probes.measured_queries import MeasuredQueries
from gsa_train.model.probes.stats import Statistics

FLAT_SLOPE = 0.01
"""Slope sigma (1 - sigma) below which a sigmoid counts as saturated: 1/25 of the maximum."""
_ROOT = math.sqrt(1 - 4 * FLAT_SLOPE)
FLAT_FROM = math.log((1 + _ROOT) / (1 - _ROOT))
"""|z| above which sigma(z) has less slope than FLAT_SLOPE."""


@torch.no_grad()
def saturation_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    indexer: Indexer | None,
    queries: MeasuredQueries,
) -> Statistics:
    """Score the sparse queries that have at least two causal keys against these keys.

    Args:
        indexer: projections of all queries; None if the layer has no indexer.
    """
    rows, sparse = queries.sample.sparse, queries.sparse
    logit = largest_logit(q[:, rows], k, sparse.causal_with_choice)
    statistics = Statistics(maxima={"max_attention_logit": logit})
    if indexer is not None:
        asked, scores = indexer.queries[:, rows], (indexer.score_bias, indexer.activation)
        scored = (sparse.causal.to(asked.dtype), sparse.visible)
        share = saturated_share(asked, indexer.keys, *scores, scored)
        statistics.average("indexer_saturated", share, sparse.has_choice[..., None])
    return statistics


def largest_logit(q: torch.Tensor, k: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Return the maximum over heads, queries t and causal keys s of q[t] . k[s] / sqrt(d_k), 0-d.

    Args:
        q: [B, T, n_h, d_k]
        k: [B, L_k, n_kv, d_k]
        causal: bool [B, T, L_k] or [1, T, L_k]
    """
    kv_heads, head_dim = k.shape[2:]
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, n_kv, n_h / n_kv, T, d_k]
    logits = grouped.flatten(2, 3) @ k.permute(0, 2, 3, 1)
    # Reduce over the heads first, because they have the same causal keys: [B, T, L_k].
    of_heads = logits.unflatten(2, grouped.shape[2:4]).amax((1, 2))
    return of_heads.masked_fill_(~causal, -torch.inf).amax() * head_dim**-0.5


def saturated_share(
    queries: torch.Tensor,
    keys: torch.Tensor,
    score_bias: torch.Tensor | None,
    activation: str,
    causal: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the fraction of causal keys where the activation (eq. 7) is flat, per query and indexer head: fp32 [B, T,
    H_I].

    Args:
        queries: [B, T, H_I, d_I]
        keys: [B, L_k, d_I]
        score_bias: b_j [H_I]
        activation: `sigmoid`, flat at both ends, or `relu`, flat below 0.
        causal: each query's causal keys as ones and zeros, [B or 1, T, L_k] in the dtype of the queries, and their
            number, [B or 1, T]
    """
    seen, number = causal
    scaled = (queries * queries.shape[-1] ** -0.5).flatten(1, 2)
    z = (scaled @ keys.transpose(1, 2)).unflatten(1, queries.shape[1:3])  # [B, T, H_I, L_k]
    if score_bias is not None:
        z += score_bias[:, None]
    assert activation in ("sigmoid", "relu"), f"when has {activation} no slope?"
    flat = z <= 0 if activation == "relu" else z.abs_() > FLAT_FROM
    # This product has the dtype of z. Summing bools would first copy them to int64.
    return (flat * seen[:, :, None]).sum(-1, dtype=torch.float32) / number[..., None]
