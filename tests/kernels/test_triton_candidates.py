"""Selection by candidates: a guess from a sample, verified. Exact whatever the guess is.

In the interpreter with a sample of every second key; on the GPU, at full size too.
"""

from typing import Any

import pytest
import torch
from poison import poison_buffers
from test_triton_selection import DEVICES, EMA, Case, check, make_case

import gsa_kernels as ops

pytest.importorskip("triton")

from gsa_kernels import limits, packed_mask
from gsa_kernels.selection import candidates, op, score_chunks, triton_guess, triton_select_long

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FULL_RULE: dict[str, Any] = {"k_base": 2048, "k_min": 256, "k_max": 4096, "mode": "inverse"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, candidates, triton_select_long)


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 keys are long, and 4 samples enough."""
    monkeypatch.setattr(op, "_TILE_MULTIPLE", 1)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 64)
    monkeypatch.setattr(limits, "CANDIDATE_SAMPLE_STRIDE", 2)
    monkeypatch.setattr(triton_guess, "FEWEST_SAMPLES", 4)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each chunk went through the full scores."""
    rows: list[int] = []
    select = candidates.select_long_rows

    def counting(*args: Any, wanted: torch.Tensor, **kwargs: Any) -> None:
        rows.append(int(wanted.sum()))
        select(*args, wanted=wanted, **kwargs)

    monkeypatch.setattr(candidates, "select_long_rows", counting)
    return rows


SMALL = {"k_base": 5, "k_min": 2, "k_max": 8, "candidates_from": 32}


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(
    ("length", "options", "changes"),
    [
        (49, {}, SMALL),
        (45, {"activation": "relu", "dtype": torch.float16}, SMALL | {"mode": "direct"}),
        (40, {"documents": True, "batch": 2}, SMALL),
        (40, {"biases": True}, SMALL | {"mode": "off", "k_base": 1, "k_min": 1, "k_max": 1}),
        (40, {}, SMALL | {"mode": "off", "k_base": 1000, "k_min": 1, "k_max": 1000}),
    ],
    ids=["sigmoid", "relu", "documents", "one", "all"],
)
def test_selection_is_the_stable_sort_of_its_own_scores(
    device: str, length: int, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    case = make_case(device, length, **options)
    check_all(case, case.select(**changes, local_window=3), local_window=3, **changes)


def check_all(case: Case, selection: op.Selection, **changes: Any) -> None:
    check(case, selection, **{name: value for name, value in changes.items() if name != "candidates_from"})


@pytest.mark.usefixtures("short_rows")
def test_a_guess_that_lets_too_few_through(
    device: str, failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled keys score high, the others low; and the guess believes that k_t is below their number."""
    case = make_case(device, 60)
    _, positions = candidates.sample_keys(op.score_inputs(case.q, case.k, case.w))
    case.k[:] = -case.q.abs().amax((0, 1, 2)) * torch.rand(60, 1, device=device)
    case.k[:, positions.long()] *= -1
    case.q.abs_()
    changes = SMALL | {"k_base": 20, "k_min": 20, "k_max": 20, "mode": "off"}
    guess = candidates.guess_thresholds

    def too_high(*args: Any) -> None:
        guess(*args)
        args[-1][..., 0] = args[-1][..., 1]  # the sample's mean

    monkeypatch.setattr(candidates, "guess_thresholds", too_high)
    check_all(case, case.select(**changes), **changes)
    assert any(failures)


def _all_equal(case: Case) -> None:
    case.k[:] = 0


def _two_levels(case: Case) -> None:
    case.k[:] = case.k[:, :1]
    case.k[:, ::3] *= -1


def _saturated(case: Case) -> None:
    case.q *= 1e3


def _zeros(case: Case) -> None:
    """Half of the keys, and more than k_t of them: no score, and the others' are negative."""
    case.w[:] = -case.w.abs() - 1
    case.k[:, 1::2] = 0
    case.q.abs_()
    case.k[:, ::2].abs_()


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("make", [_all_equal, _two_levels, _saturated, _zeros])
def test_ties(device: str, make: Any, failures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More equal scores than there is room for; the candidates are the first of them."""
    monkeypatch.setattr(limits, "candidate_room", lambda k_max: 64)
    case = make_case(device, 130)
    make(case)
    selection = case.select(**SMALL)
    check_all(case, selection, **SMALL)
    if make is _all_equal:
        assert not selection.variance.any()  # to the bit, not to rounding
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
def test_variance_does_not_cancel(device: str) -> None:
    """Scores near 2 that differ by 1e-5 of it."""
    case = make_case(device, 40)
    case.q *= 1e-4
    visible = case.visible()
    _, exact = ops.score_moments(torch.where(visible, case.scores(), 0).double(), visible)
    torch.testing.assert_close(case.select(**SMALL).variance.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("short_rows")
def test_future_tokens_chunks_and_repetition_change_no_bit(device: str) -> None:
    case = make_case(device, 40)
    first = case.select(local_window=3, **SMALL)
    again = case.select(local_window=3, row_chunk_bytes=1, **SMALL)  # one tile of rows at a time
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    cut = 37
    for tensor in (case.q, case.k, case.w):
        tensor[:, cut:] = tensor[:, cut:].flip(1) * 3
    changed = case.select(local_window=3, **SMALL)
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(first, name)[:, :cut], getattr(changed, name)[:, :cut])
    assert not torch.equal(first.variance, changed.variance)


def check_rows(case: Case, selection: op.Selection, starts: list[int], **rule: Any) -> None:
    """As `check`, for 64 rows from each start."""
    length = case.k.shape[1]
    ema = torch.tensor(EMA, device=case.q.device)
    for start in starts:
        rows = torch.arange(start, min(start + 64, length), device=case.q.device)
        visible = ops.causal_mask(
            length,
            query_positions=rows,
            document_ids=case.options.get("document_starts"),
            device=case.q.device,
        )
        scores = op.score_rows(case.q, case.k, case.w, start, int(rows[-1]) + 1, **case.options)
        scores = torch.where(visible, scores, 0)
        _, variance = ops.score_moments(scores, visible)
        torch.testing.assert_close(selection.variance[:, rows], variance, rtol=1e-5, atol=1e-12)
        budget = ops.adaptive_budget(selection.variance[:, rows], ema, visible.sum(-1), **rule)
        assert torch.equal(selection.budget[:, rows], budget.int())
        wanted = ops.select_top_k(scores, visible, budget)
        assert torch.equal(packed_mask.unpack_mask(selection.words[:, rows], length), wanted)


def _as_drawn(case: Case) -> None:
    pass


def _alike(case: Case) -> None:
    """Neighbouring keys are nearly the same, as in text that repeats."""
    case.k[:] = case.k[:, ::64].repeat_interleave(64, 1)[:, : case.k.shape[1]] + case.k * 1e-2


@pytest.mark.parametrize(
    ("length", "make", "options"),
    [
        pytest.param(length, make, options, marks=ON_GPU)
        for length, make, options in [
            (20000, _as_drawn, {"biases": True}),
            (20001, _as_drawn, {"documents": True, "batch": 2}),
            (33000, _as_drawn, {"activation": "relu"}),
            (33000, _alike, {"dtype": torch.float16}),
            (20000, _saturated, {}),
            (20000, _all_equal, {}),
            (20000, _zeros, {"activation": "relu"}),
            (12000, _as_drawn, {"dtype": torch.float32}),
            (131072, _as_drawn, {}),
        ]
    ],
)
def test_long_rows(length: int, make: Any, options: dict[str, Any]) -> None:
    """At full size, on a sample of the rows."""
    case = make_case("cuda", length, heads=4, dim=64, **{"dtype": torch.bfloat16} | options)
    make(case)
    selection = case.select(**FULL_RULE, candidates_from=8192)
    again = case.select(**FULL_RULE, candidates_from=8192, row_chunk_bytes=64 * 2**20)
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(selection, name), getattr(again, name))
    check_rows(case, selection, [0, 8170, 11000, length // 2, length - 64], **FULL_RULE)
