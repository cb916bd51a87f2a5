"""Defines the indexer loss: the KL from attention probabilities to the softmax of the scores (eqs. 14, 15)."""

import torch

from gsa_kernels.checks import check_mask, check_shape, compute_dtype


def renormalise_target(probs: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Return target[r, s] = probs[r, s] / sum_{s' in attended_r} probs[r, s'] on the attended set, 0 elsewhere.

    Args:
        probs: [B, R, Lk], at any positive scale, for example a sum over heads
        attended: bool [B or 1, R, Lk]

    Returns:
        [B, R, Lk] in fp32 (fp64 for fp64 probs); all 0 for a row without probability in its attended set.
    """
    check_shape("probs", probs, "[B, R, Lk]", (None, None, None))
    check_mask("attended", attended, *probs.shape)
    on_attended = torch.where(attended, probs.to(compute_dtype(probs=probs)), 0)
    total = on_attended.sum(-1, keepdim=True)
    return on_attended / torch.where(total > 0, total, 1)


def indexer_kl(
    scores: torch.Tensor,
    target: torch.Tensor,
    attended: torch.Tensor,
    inverse_temperature: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Compute KL(p || softmax_{s in attended}(beta * I)) = sum_s p log p - sum_s p log softmax(beta * I)_s.

    Only `scores` and `inverse_temperature` get gradients; entries off the attended set get exactly 0.

    Args:
        scores: I, [B, R, Lk]
        target: p, [B, R, Lk], each row summing to 1 on its attended set (`renormalise_target`)
        attended: bool [B or 1, R, Lk]: all causal keys in the indexer's warm-up, S_t in sparse training
        inverse_temperature: beta, a number or a 0-d tensor; 1 is the paper

    Returns:
        [B, R] in fp32 (fp64 if scores or target are fp64); 0 for a row whose target is all 0.
    """
    check_shape("scores", scores, "[B, R, Lk]", (None, None, None))
    check_shape("target", target, "[B, R, Lk]", tuple(scores.shape))
    check_mask("attended", attended, *scores.shape)
    if isinstance(inverse_temperature, torch.Tensor):
        check_shape("inverse_temperature", inverse_temperature, "a 0-d tensor", ())
    dtype = compute_dtype(scores=scores, target=target)

    p = torch.where(attended, target.detach().to(dtype), 0)
    logits = torch.where(attended, scores.to(dtype), 0) * inverse_temperature
    # An empty row is normalised over all keys. Its p is 0, so it adds nothing to the value or the gradient.
    normalised_over = attended | ~attended.any(-1, keepdim=True)
    log_q = logits.masked_fill(~normalised_over, float("-inf")).log_softmax(-1)
    # p and q both sum to 1, so q - p may be added to p log(p / q). Each term is then positive and of second order in r
    # = log(q / p). Nothing cancels where p and q are close.
    counted = attended & (p.sum(-1, keepdim=True) > 0)
    log_q = torch.where(counted, log_q, 0)
    r = log_q - torch.where(p > 0, p, 1).log()
    small = r.abs() < 1
    near = p * (torch.expm1(torch.where(small, r, 0)) - r)
    far = log_q.exp() - p - p * r
    return torch.where(counted, torch.where(small & (p > 0), near, far), 0).sum(-1)
