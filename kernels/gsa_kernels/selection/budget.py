"""Computes the number of keys of each query from the variance of its indexer scores (GSA, equation 8)."""

from typing import Literal

import torch

from gsa_kernels.checks import check_budget_rule, check_mask, check_row_counts, check_shape, compute_dtype


def score_moments(scores: torch.Tensor, causal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and population variance of each row's scores over its causal keys.

    The variance is mean((x - mean(x))^2) in two passes, because E[x^2] - E[x]^2 loses precision if scores are nearly
    equal. The sums are fp64, so that equal scores have variance 0. The statistics of a row do not depend on later keys,
    so prefill and decoding compute the same statistics.

    Args:
        scores: [B, R, Lk]
        causal: bool [B or 1, R, Lk]

    Returns:
        mean [B, R], variance [B, R], in fp32 (fp64 for fp64 scores); both 0 for a row without causal keys.
    """
    check_shape("scores", scores, "[B, R, Lk]", (None, None, None))
    batch, rows, num_keys = scores.shape
    check_mask("causal", causal, batch, rows, num_keys)
    dtype = compute_dtype(scores=scores)
    scores = scores.to(dtype)
    count = causal.sum(-1).clamp(min=1)
    mean = (torch.where(causal, scores, 0).sum(-1, dtype=torch.float64) / count).to(dtype)
    deviation = torch.where(causal, scores - mean[..., None], 0)
    variance = (deviation.square().sum(-1, dtype=torch.float64) / count).to(dtype)
    return mean, variance


def adaptive_budget(
    variance: torch.Tensor,
    variance_ema: torch.Tensor,
    num_causal: torch.Tensor,
    *,
    k_base: int,
    k_min: int,
    k_max: int,
    adaptive_k: Literal["inverse", "direct", "off"],
    dense_below: int = 0,
) -> torch.Tensor:
    """Compute k_t = min(clamp(floor(raw), k_min, k_max), number of causal keys).
    inverse:  raw = k_base * ema / var   (a confident indexer has a high variance and gets fewer keys)
    direct:   raw = k_base * var / ema   (equation 8 as printed)
    off:      raw = k_base

    If a row has fewer than `dense_below` causal keys, it gets all of them. While ema is 0, there are no statistics yet,
    and raw is k_base. If ema is above 0 and var is 0, the result is k_max for inverse, and k_min for direct. If the
    variance is NaN, because scores are not finite, raw is k_base.

    Args:
        variance: [B, R], per query
        variance_ema: 0-d, the layer's moving average before this step
        num_causal: int [B or 1, R]

    Returns:
        int64 [B, R]
    """
    check_shape("variance", variance, "[B, R]", (None, None))
    check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
    check_row_counts("num_causal", num_causal, *variance.shape)
    check_budget_rule(k_base, k_min, k_max, adaptive_k, dense_below)

    # With fp64 and fp32 statistics, the result is the floor of the exact quotient on any device.
    var, ema = variance.detach().double(), variance_ema.detach().double()
    if adaptive_k == "inverse":
        raw = k_base * ema / var
    elif adaptive_k == "direct":
        raw = k_base * var / ema
    else:
        raw = torch.full_like(var, k_base)
    raw = torch.where((ema == 0) | raw.isnan(), float(k_base), raw)
    # The value is clamped before the cast, because an infinite float has no defined integer.
    budget = raw.floor().clamp(k_min, k_max).to(torch.int64)
    num_causal = num_causal.to(torch.int64)
    return torch.where(num_causal < dense_below, num_causal, torch.minimum(budget, num_causal))
