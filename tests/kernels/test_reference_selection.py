"""Tests causal keys, score moments, budget and selection: ties, degenerate rows, limits."""

import math

import pytest
import torch

from gsa_kernels import reference as ops

INF = float("inf")
LENGTHS = [1, 2, 17, 33]


def ranked_by_python(scores: torch.Tensor, visible: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    selected = torch.zeros(scores.shape, dtype=torch.bool)
    for b, row in ((b, r) for b in range(scores.shape[0]) for r in range(scores.shape[1])):
        keys = [s for s in range(scores.shape[2]) if visible[b % visible.shape[0], row, s]]
        keys.sort(key=lambda s: (-scores[b, row, s].item(), s))
        selected[b, row, keys[: int(budget[b % budget.shape[0], row])]] = True
    return selected


# score moments


def test_variance_does_not_cancel() -> None:
    """In fp32 the error of E[x^2] - E[x]^2 exceeds the variance of these scores."""
    spread = torch.linspace(-1e-3, 1e-3, 1000)
    scores = (3.9 + spread)[None, None]
    _, variance = ops.score_moments(scores, torch.ones(1, 1, 1000, dtype=torch.bool))
    exact = scores.double().var(correction=0)
    assert variance.dtype == torch.float32
    assert abs(variance.item() / exact.item() - 1) < 1e-4
    naive = scores.square().mean() - scores.mean().square()
    assert abs(naive.item() / exact.item() - 1) > 0.1


def test_moments_do_not_depend_on_how_many_keys_follow() -> None:
    scores = 4 * torch.rand(1, 700, 700, generator=torch.Generator().manual_seed(0))
    whole = ops.score_moments(scores, ops.causal_mask(700))
    for length in (1, 37, 500):
        part = ops.score_moments(scores[:, :length, :length], ops.causal_mask(length))
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a[:, :length], b)


def test_moments_of_bfloat16_scores_are_fp32_and_of_an_empty_row_zero() -> None:
    scores = torch.full((1, 1, 4), 2.5, dtype=torch.bfloat16)
    mean, variance = ops.score_moments(scores, torch.ones(1, 1, 4, dtype=torch.bool))
    assert mean.dtype == variance.dtype == torch.float32
    assert (mean.item(), variance.item()) == (2.5, 0.0)
    mean, variance = ops.score_moments(scores, torch.zeros(1, 1, 4, dtype=torch.bool))
    assert (mean.item(), variance.item()) == (0.0, 0.0)


# budget


def budget_of(variance: float, ema: float, mode: str, num_visible: int = 10**6, **limits: int) -> int:
    limits = {"k_base": 100, "k_min": 8, "k_max": 400, **limits}
    budget = ops.adaptive_budget(
        torch.tensor([[variance]]),
        torch.tensor(ema),
        torch.tensor([[num_visible]]),
        adaptive_k=mode,
        **limits,
    )
    assert budget.dtype == torch.int64
    assert budget.shape == (1, 1)
    return int(budget)


@pytest.mark.parametrize(
    ("mode", "variance", "ema", "expected"),
    [
        ("inverse", 0.5, 1.0, 200),
        ("direct", 0.5, 1.0, 50),
        ("off", 0.5, 1.0, 100),
        ("inverse", 1.5, 1.0, 66),
        ("direct", 0.375, 1.0, 37),
        ("inverse", 1e-30, 1.0, 400),
        ("inverse", 1e30, 1.0, 8),
        ("direct", 1e-30, 1.0, 8),
        ("direct", 1e30, 1e-30, 400),
        ("inverse", 1e-45, 3e38, 400),
        # The scores have no spread.
        ("inverse", 0.0, 1.0, 400),
        ("direct", 0.0, 1.0, 8),
        # Without statistics, the ratio is 1.
        ("inverse", 0.7, 0.0, 100),
        ("direct", 0.7, 0.0, 100),
        ("inverse", 0.0, 0.0, 100),
        ("direct", 0.0, 0.0, 100),
        # The scores overflowed.
        ("inverse", INF, 1.0, 8),
        ("direct", INF, 1.0, 400),
        ("inverse", INF, INF, 100),
        ("inverse", math.nan, 1.0, 100),
        ("direct", 1.0, math.nan, 100),
    ],
)
def test_budget(mode: str, variance: float, ema: float, expected: int) -> None:
    assert budget_of(variance, ema, mode) == expected


def test_budget_limits() -> None:
    assert budget_of(1.0, 1.0, "off", k_base=5) == 8
    assert budget_of(1.0, 1.0, "off", k_base=500) == 400
    assert budget_of(1.0, 1.0, "inverse", num_visible=3) == 3
    assert budget_of(0.0, 1.0, "inverse", num_visible=100) == 100
    assert budget_of(1.0, 1.0, "direct", num_visible=0) == 0
    assert budget_of(1.0, 1.0, "off", k_min=1, k_max=1) == 1


def test_rows_that_see_few_keys_select_all() -> None:
    for mode, variance in (("inverse", 1.0), ("direct", 0.0), ("off", math.nan)):
        found = [budget_of(variance, 1.0, mode, seen, k_max=100, dense_below=500) for seen in (0, 1, 499)]
        assert found == [0, 1, 499]
        assert budget_of(variance, 1.0, mode, 500, k_max=100, dense_below=500) <= 100
    with pytest.raises(ValueError, match="dense_below is -1"):
        budget_of(1.0, 1.0, "off", dense_below=-1)


# top-k


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("levels", [1, 2, 3, 10**6])
def test_top_k_with_ties(length: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(length)
    scores = torch.randint(levels, (2, length, length), generator=generator).float()
    documents = torch.arange(length).expand(2, -1) // 11
    visible = ops.causal_mask(length) & (documents[:, :, None] == documents[:, None])
    for budget in (
        torch.full((1, length), 1),
        torch.full((1, length), 4),
        torch.arange(1, length + 1)[None],
        torch.randint(0, length + 3, (2, length), generator=generator),
    ):
        selected = ops.select_top_k(scores, visible, budget)
        assert torch.equal(selected, ranked_by_python(scores, visible, budget))


def test_zero_of_either_sign_is_a_tie() -> None:
    """The ReLU indexer produces both: a negative weight times relu(...) = 0 is -0.0."""
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0]]])
    selected = ops.select_top_k(scores, torch.ones(1, 1, 4, dtype=torch.bool), torch.tensor([[2]]))
    assert selected.tolist() == [[[True, True, False, False]]]


def test_negative_scores_are_selected_before_invisible_keys() -> None:
    scores = torch.tensor([[[5.0, -1e30, -2.0, 9.0]]])
    visible = torch.tensor([[[False, True, True, False]]])
    for budget, expected in ((1, [2]), (2, [1, 2]), (4, [1, 2])):
        selected = ops.select_top_k(scores, visible, torch.tensor([[budget]]))
        assert selected[0, 0].nonzero().flatten().tolist() == expected


# indexer scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_calculated_in_fp32(dtype: torch.dtype) -> None:
    q_idx, k_idx, w = (torch.randn(s).to(dtype) for s in ((2, 17, 4, 64), (2, 17, 64), (2, 17, 4)))
    scores = ops.indexer_scores(q_idx, k_idx, w)
    assert scores.dtype == torch.float32
    exact = ops.indexer_scores(q_idx.double(), k_idx.double(), w.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    assert scores.min() > 0
    assert scores.max() < 4
