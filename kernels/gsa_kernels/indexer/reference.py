"""Computes indexer scores, which rate how useful each key is for each query (GSA, equation 7)."""

from typing import Literal

import torch

from gsa_kernels.checks import check_activation, check_shape, compute_dtype
from gsa_kernels.types import Indexer


def indexer_scores(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
) -> torch.Tensor:
    """Compute the scores of every query against every key, causal or not.
    sigmoid (GSA):  I[t,s] = sum_j sigmoid(w[t,j] + c_j) * sigmoid(q[t,j] . k[s] / sqrt(DI) + b_j),
                    in (0, HI)
    relu (DSA):     I[t,s] = sum_j w[t,j] * relu(q[t,j] . k[s] / sqrt(DI)), unbounded, without biases

    Args:
        q_idx: [B, Lq, HI, DI]
        k_idx: [B, Lk, DI], one key for all indexer heads
        weight_logits: w, [B, Lq, HI]
        score_bias: b, [HI], zero if None
        weight_bias: c, [HI], zero if None

    Returns:
        [B, Lq, Lk] in fp32 (fp64 if an input is fp64).
    """
    check_shape("q_idx", q_idx, "[B, Lq, HI, DI]", (None, None, None, None))
    batch, num_queries, heads, dim = q_idx.shape
    check_shape("k_idx", k_idx, "[B, Lk, DI]", (batch, None, dim))
    check_shape("weight_logits", weight_logits, "[B, Lq, HI]", (batch, num_queries, heads))
    check_activation(activation, heads, score_bias=score_bias, weight_bias=weight_bias)

    dtype = compute_dtype(q_idx=q_idx, k_idx=k_idx, weight_logits=weight_logits)
    keys = k_idx.to(dtype)
    weights = weight_logits.to(dtype)
    if activation == "sigmoid":
        weights = torch.sigmoid(weights if weight_bias is None else weights + weight_bias.to(dtype))

    scores = torch.zeros(batch, num_queries, keys.shape[1], dtype=dtype, device=q_idx.device)
    # The loop over heads keeps only one [Lq, Lk] product in memory at a time.
    for head in range(heads):
        product = q_idx[:, :, head].to(dtype) @ keys.transpose(1, 2) * dim**-0.5
        if activation == "relu":
            activated = torch.relu(product)
        else:
            activated = torch.sigmoid(product if score_bias is None else product + score_bias[head].to(dtype))
        scores = scores + weights[:, :, head, None] * activated
    return scores


def scores_of(indexer: Indexer) -> torch.Tensor:
    """Return `indexer_scores` of an indexer: [B, L, Lk]."""
    return indexer_scores(
        indexer.queries,
        indexer.keys,
        indexer.head_weight_logits,
        score_bias=indexer.score_bias,
        weight_bias=indexer.head_weight_bias,
        activation=indexer.activation,
    )
