"""Tests attention, gates and the indexer's KL: empty rows, dtypes, gradients."""

import pytest
import torch

from gsa_kernels import reference as ops


def random_selection(length: int, share: float = 0.4) -> torch.Tensor:
    chosen = torch.rand(2, length, length, generator=torch.Generator().manual_seed(1)) < share
    return (chosen | torch.eye(length, dtype=torch.bool)) & ops.causal_mask(length)


# attention


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_an_empty_row_gives_zeros_and_finite_gradients() -> None:
    torch.manual_seed(17)
    q, k, v = (torch.randn(2, 17, n, 4, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    mask = random_selection(17)
    mask[:, [0, 5, 16]] = False
    result = ops.sparse_attention(q, k, v, mask, recall_among=ops.causal_mask(17), return_probs=True)
    for tensor in (result.out, result.head_sum_probs, result.recall):
        assert tensor is not None
        assert tensor.isfinite().all()
        assert not tensor[:, [0, 5, 16]].any()
    with torch.autograd.detect_anomaly(check_nan=True):
        result.out.sum().backward()
    assert q.grad is not None
    assert not q.grad[:, [0, 5, 16]].any()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


# gates


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gate_is_calculated_in_fp32_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    x, logits = torch.randn(2, 5, 3, 4).to(dtype), torch.randn(2, 5, 3, 4).to(dtype)
    gated = ops.sigmoid_gate(x, logits)
    assert gated.dtype == dtype
    torch.testing.assert_close(gated, (x.double() / (1 + (-logits.double()).exp())).to(dtype))
    headwise = ops.sigmoid_gate(x, logits[..., :1])
    torch.testing.assert_close(headwise, ops.sigmoid_gate(x, logits[..., :1].expand_as(x)))


# KL


def kl_inputs(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    support = random_selection(rows)
    scores = 4 * torch.rand(2, rows, rows, generator=generator, dtype=torch.float64)
    weights = torch.rand(2, rows, rows, generator=generator, dtype=torch.float64)
    return scores, ops.renormalise_target(weights, support), support


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_kl_trains_scores_and_beta_only_and_only_on_the_support() -> None:
    scores, target, support = kl_inputs()
    support[0, 2] = False
    beta = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    # Scores off the support must not matter, whatever they are.
    scores = scores.masked_fill(~support, float("nan")).requires_grad_()
    target = target.masked_fill(~support, float("inf")).requires_grad_()
    kl = ops.indexer_kl(scores, target, support, beta)
    assert kl.isfinite().all()
    assert kl[0, 2] == 0
    with torch.autograd.detect_anomaly(check_nan=True):
        kl.sum().backward()
    assert target.grad is None
    assert scores.grad is not None
    assert beta.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[~support].any()
    assert beta.grad.isfinite()
    probabilities = (1.7 * scores.detach()).masked_fill(~support, float("-inf")).softmax(-1)
    row_filled = support.any(-1)
    expected = 1.7 * (probabilities - target.detach())
    torch.testing.assert_close(
        scores.grad[support & row_filled[..., None]], expected[support & row_filled[..., None]]
    )


def test_targets_renormalise_on_their_support() -> None:
    _, _, support = kl_inputs()
    support[1, 3] = False
    probs = torch.rand(2, 6, 6)
    target = ops.renormalise_target(probs, support)
    torch.testing.assert_close(target.sum(-1), support.any(-1).float())
    assert not target[~support].any()
    tiny = ops.renormalise_target(probs * 1e-38, support)
    torch.testing.assert_close(tiny.sum(-1), support.any(-1).float())
