"""Tests attention, gates and the indexer's KL: gradients, empty rows, recall, dtypes."""

import itertools

import pytest
import torch

from gsa_kernels import reference as ops


def make_qkv(
    length: int, heads: int = 4, kv_heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = ((2, length, heads, dim), (2, length, kv_heads, dim), (2, length, kv_heads, dim))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return q, k, v


def random_selection(length: int, share: float = 0.4) -> torch.Tensor:
    chosen = torch.rand(2, length, length, generator=torch.Generator().manual_seed(1)) < share
    return (chosen | torch.eye(length, dtype=torch.bool)) & ops.causal_mask(length)


# attention


def test_measurements_carry_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(5))
    visible = ops.causal_mask(5)
    result = ops.sparse_attention(q, k, v, visible, recall_among=visible, return_probs=True)
    assert result.out.requires_grad
    for measured in (result.head_sum_probs, result.recall):
        assert measured is not None
        assert not measured.requires_grad


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_an_empty_row_gives_zeros_and_finite_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(17))
    mask = random_selection(17)
    mask[:, [0, 5, 16]] = False
    result = ops.sparse_attention(
        q,
        k,
        v,
        mask,
        recall_among=ops.causal_mask(17),
        return_probs=True,
    )
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


def test_logits_far_apart_do_not_overflow() -> None:
    q, k, v = make_qkv(9, dtype=torch.float32)
    visible = ops.causal_mask(9)
    result = ops.sparse_attention(1e4 * q, 1e4 * k, v, visible, recall_among=visible)
    assert result.out.isfinite().all()
    assert result.recall is not None
    torch.testing.assert_close(result.recall, torch.ones_like(result.recall))


# recall


def test_recall_is_the_dense_probability_on_the_mask() -> None:
    q, k, v = make_qkv(17)
    visible = ops.causal_mask(17, document_ids=torch.arange(17)[None] // 6)
    mask = random_selection(17) & visible
    recall = ops.sparse_attention(q, k, v, mask, recall_among=visible).recall
    dense = ops.sparse_attention(q, k, v, visible, recall_among=visible, return_probs=True)
    assert recall is not None
    assert dense.recall is not None
    assert dense.head_sum_probs is not None
    torch.testing.assert_close(recall.sum(-1), (dense.head_sum_probs * mask).sum(-1))
    assert torch.equal(dense.recall, torch.ones_like(dense.recall))


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


def test_kl_against_torch_and_its_zero() -> None:
    scores, target, support = kl_inputs()
    kl = ops.indexer_kl(scores, target, support, 1.7)
    for b, row in itertools.product(range(2), range(6)):
        keys = support[b, row]
        log_q = (1.7 * scores[b, row, keys]).log_softmax(-1)
        expected = torch.nn.functional.kl_div(log_q, target[b, row, keys], reduction="sum")
        torch.testing.assert_close(kl[b, row], expected)
    matched = ops.indexer_kl(target.clamp(min=1e-300).log(), target, support)
    torch.testing.assert_close(matched, torch.zeros_like(matched), atol=1e-14, rtol=0)
    assert ops.indexer_kl(scores.float(), target.float(), support).dtype == torch.float32


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


def test_kl_with_a_one_hot_target_has_the_floor_of_bounded_scores() -> None:
    """Scores in (0, 4) give one key at most e^4 / (e^4 + n - 1), so that 4.34 nats remain at n = 4096."""
    n = 4096
    scores = torch.zeros(1, 1, n)
    scores[0, 0, 7] = 4.0
    target = torch.zeros(1, 1, n)
    target[0, 0, 7] = 1.0
    support = torch.ones(1, 1, n, dtype=torch.bool)
    assert ops.indexer_kl(scores, target, support).item() == pytest.approx(4.33, abs=0.01)
    assert ops.indexer_kl(scores, target, support, 10.0).item() == pytest.approx(0.0, abs=1e-6)


def test_targets_renormalise_on_their_support() -> None:
    _, _, support = kl_inputs()
    support[1, 3] = False
    probs = torch.rand(2, 6, 6)
    target = ops.renormalise_target(probs, support)
    torch.testing.assert_close(target.sum(-1), support.any(-1).float())
    assert not target[~support].any()
    tiny = ops.renormalise_target(probs * 1e-38, support)
    torch.testing.assert_close(tiny.sum(-1), support.any(-1).float())
