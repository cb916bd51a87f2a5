"""Tests selection by candidates, which are the keys whose scores exceed a threshold. The threshold is guessed from a
sample of keys, and a wrong guess must not change the result.

A chunk of queries from the middle of a sequence, as on a context-parallel rank, must get the same results as in the
whole sequence. In the interpreter, kernels estimate thresholds from every second key. Tests on a GPU also cover long
sequences.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covered
from kernel_devices import ON_GPU
from poison import poison_buffers
from selection_cases import (
    FULL_RULE,
    Case,
    all_equal,
    assert_same_bits,
    check,
    check_no_bit_changes,
    check_variance_of_like_scores,
    make_case,
    saturated,
    two_levels,
)

from gsa_kernels import limits, packed_mask
from gsa_kernels.indexer.score_inputs import score_inputs
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists
from gsa_kernels.selection import (
    candidates,
    lists_op,
    op,
    score_chunks,
    triton_guess,
    triton_select_long,
)
from gsa_kernels.types import BudgetRule, Geometry, Selection

RULE = BudgetRule(k_base=5, k_min=2, k_max=8)
RULES = {
    "inverse": RULE, "direct": replace(RULE, adaptive_k="direct"), "one": BudgetRule(1, 1, 1, "off"),
    "all": BudgetRule(1000, 1, 1000, "off"), "dense below": replace(RULE, dense_below=44),
}  # fmt: skip


EIGHT_HEADS: dict[str, Any] = {"heads": 8, "activation": "relu"}
"""As in the recommended indexer. Five to eight heads of at most 64 have larger tiles."""


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, lists_op, candidates, triton_select_long)


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat rows of 32 keys as long, and let 4 samples suffice."""
    monkeypatch.setattr(op, "_TILE_MULTIPLE", 32)  # tile size of fp32
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 64)
    monkeypatch.setattr(limits, "CANDIDATE_SAMPLE_STRIDE", 2)
    monkeypatch.setattr(triton_guess, "FEWEST_SAMPLES", 4)


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Record the chunks of rows that were selected by candidates."""
    chunks: list[range] = []
    select = op.select_by_candidates

    def recording(criteria: Any, sample: Any, rows: range, outputs: Any) -> torch.Tensor:
        chunks.append(rows)
        return select(criteria, sample, rows, outputs)

    monkeypatch.setattr(op, "select_by_candidates", recording)
    return chunks


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many rows of each chunk used the full scores."""
    rows: list[int] = []
    select = candidates.select_long_rows

    def counting(*args: Any, wanted: torch.Tensor) -> None:
        rows.append(int(wanted.sum()))
        select(*args, wanted=wanted)

    monkeypatch.setattr(candidates, "select_long_rows", counting)
    return rows


def change_guesses(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Call `change` with the guesses of rows, fp32 [B, R, 3], after each call."""
    guess = candidates.guess_thresholds

    def changed(*args: Any) -> None:
        guess(*args)
        change(args[-1].of_rows)

    monkeypatch.setattr(candidates, "guess_thresholds", changed)


def check_rows_of_whole(found: Selection, whole: Selection, start: int) -> None:
    """Check that `found` has the rows of the queries from `start` on, except for the variance."""
    rows = slice(start, start + found.budget.shape[1])
    assert found.packed_mask is not None
    assert whole.packed_mask is not None
    mask, words = whole.packed_mask[:, rows], found.packed_mask.shape[2]
    assert torch.equal(found.packed_mask, mask[..., :words])
    assert not mask[..., words:].any()
    assert torch.equal(found.budget, whole.budget[:, rows])


@pytest.mark.usefixtures("short_rows")
@covered(
    "options",
    rule=list(RULES),
    queries=[(0, 37), (33, 50), (64, 80)],  # at the start, inside a tile of rows, at its border
    documents=[False, True],
    dtype=[torch.float32, torch.bfloat16],
    activation=["sigmoid", "relu"],
    heads=[2, 5],
)
def test_selection_is_the_stable_sort_of_its_own_scores(
    device: str, options: dict[str, Any], guessed: list[range], failures: list[int]
) -> None:
    rule, (start, stop), documents = RULES[options["rule"]], options["queries"], options["documents"]
    relu = options["activation"] == "relu"
    case = make_case(
        device,
        100,
        batch=1 + documents,
        documents=documents,
        biases=not relu,
        activation=options["activation"],
        dtype=options["dtype"],
        heads=options["heads"],
    )
    chunk = case.queries_from(start, stop)
    check(chunk, chunk.select(rule, 3, candidates_from=32), rule, 3)
    assert guessed == [range(max(32 - start, 0), stop - start)]
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("make", [None, all_equal])
def test_many_heads_have_several_spans_per_program(device: str, make: Any, failures: list[int]) -> None:
    """2200 keys are five spans, for two programs."""
    case = make_case(device, 2200, heads=5, activation="relu", dtype=torch.bfloat16)
    if make is not None:
        make(case)
    chunk = case.queries_from(2170, 2200)
    check(chunk, chunk.select(RULE, 3, candidates_from=32), RULE, 3)
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
def test_the_first_rows_of_a_chunk_may_see_too_few_keys(
    device: str, guessed: list[range], failures: list[int]
) -> None:
    """Selection by candidates begins at the first row of a tile. Small chunks give the same."""
    chunk = make_case(device, 88, documents=True).queries_from(17, 88)
    found = chunk.select(RULE, 3, candidates_from=64)
    assert guessed == [range(64, 71)]  # rows with at least 47 keys, in whole tiles
    check(chunk, found, RULE, 3)
    in_chunks = chunk.select(RULE, 3, candidates_from=32, row_chunk_bytes=1)
    assert guessed[1:] == [range(32, 64), range(64, 71)]
    for name in ("packed_mask", "budget"):
        assert torch.equal(getattr(in_chunks, name), getattr(found, name))
    assert torch.equal(in_chunks.variance[:, 64:], found.variance[:, 64:])
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
def test_short_documents_far_from_the_start(device: str, failures: list[int]) -> None:
    """The programs for the 256 keys before the documents write nothing."""
    case = make_case(device, 600)
    positions = torch.arange(600, dtype=torch.int32)
    starts = torch.where(positions < 585, 530, 585)[None].to(device=device, dtype=torch.int32)
    case.geometry = replace(case.geometry, document_starts=starts)
    chunk = case.queries_from(575, 600)
    check(chunk, chunk.select(RULE, 3, candidates_from=64), RULE, 3)
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_lists_of_a_chunk(device: str, documents: bool, guessed: list[range]) -> None:
    """Without documents the packed masks are not zeroed, so all words that are read must be written."""
    chunk = make_case(device, 80, documents=documents).queries_from(41, 80)
    options = {"candidates_from": 64, "row_chunk_bytes": 1}
    packed = chunk.select(RULE, 3, **options)
    listed = chunk.select(RULE, 3, lists_op.select_key_lists, **options)
    assert guessed == [range(32, 39)] * 2
    assert packed.packed_mask is not None
    assert listed.key_lists is not None
    assert torch.equal(mask_from_key_lists(listed.key_lists), packed_mask.unpack_mask(packed.packed_mask, 80))
    assert torch.equal(listed.budget, packed.budget)
    assert torch.equal(listed.variance, packed.variance)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_rows_that_are_done_again(
    device: str, documents: bool, failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guesses of some rows let too few keys pass, and other guesses too many."""

    def wrong(guesses: torch.Tensor) -> None:
        guesses[:, ::3, 0] = 1e9
        guesses[:, 1::3, 0] = -1e9

    change_guesses(monkeypatch, wrong)
    monkeypatch.setattr(limits, "candidate_room", lambda k_max: 64)
    chunk = make_case(device, 100, documents=documents).queries_from(65, 100)
    found = chunk.select(RULE, 3, candidates_from=64)
    assert failures == [(24 if not documents else 12)]
    check(chunk, found, RULE, 3)


@pytest.mark.usefixtures("short_rows")
def test_a_guess_that_lets_too_few_through(
    device: str, failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled keys have high scores and the others low ones; the guess assumes a small k_t."""
    case = make_case(device, 60)
    _, positions = candidates.sample_keys(score_inputs(case.indexer, case.geometry))
    shares = torch.rand(60, 1, generator=torch.Generator().manual_seed(0)).to(device)
    case.k[:] = -case.q.abs().amax((0, 1, 2)) * shares
    case.k[:, positions.long()] *= -1
    case.q.abs_()
    rule = BudgetRule(20, 20, 20, "off")
    change_guesses(monkeypatch, lambda guesses: guesses[..., 0].copy_(guesses[..., 1]))  # the sample's mean
    check(case, case.select(rule, candidates_from=32), rule)
    assert any(failures)


def zeros(case: Case) -> None:
    """Give half of the keys, more than k_t, a score of 0, and the others negative scores."""
    case.w[:] = -case.w.abs() - 1
    case.k[:, 1::2] = 0
    case.q.abs_()
    case.k[:, ::2].abs_()


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("make", [all_equal, two_levels, saturated, zeros])
def test_ties(device: str, make: Any, failures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More scores are equal than the list has room for; the candidates are the first of them."""
    monkeypatch.setattr(limits, "candidate_room", lambda k_max: 64)
    case = make_case(device, 150)
    make(case)
    chunk = case.queries_from(125, 150)
    found = chunk.select(RULE, candidates_from=64)
    check(chunk, found, RULE)
    if make is all_equal:
        assert not found.variance.any()  # to the bit, not up to rounding
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
def test_variance_does_not_cancel(device: str) -> None:
    check_variance_of_like_scores(make_case(device, 40), rule=RULE, candidates_from=32)


@pytest.mark.usefixtures("short_rows")
def test_future_tokens_chunks_and_repetition_change_no_bit(device: str) -> None:
    check_no_bit_changes(make_case(device, 40), 37, rule=RULE, candidates_from=32)


@pytest.mark.parametrize("stride", [2, 32])
def test_the_sample_does_not_depend_on_where_the_keys_end(
    stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CANDIDATE_SAMPLE_STRIDE", stride)
    case = make_case("cpu", 200)
    _, every = candidates.sample_keys(score_inputs(case.indexer, case.geometry))
    assert torch.equal(every // stride, torch.arange(len(every), dtype=torch.int32))  # one of each group
    for stop in range(1, 200, 7):
        chunk = case.queries_from(0, stop)
        inputs, sampled = candidates.sample_keys(score_inputs(chunk.indexer, chunk.geometry))
        assert torch.equal(sampled, every[every < stop])
        assert torch.equal(inputs.indexer.keys, case.k[:, sampled.long()])


def test_no_gradient(device: str) -> None:
    chunk = make_case(device, 70).queries_from(64, 70)
    for leaf in (chunk.q, chunk.k, chunk.w):
        leaf.requires_grad_()
    found = chunk.select(RULE, candidates_from=64)
    assert found.packed_mask is not None
    assert not any(x.requires_grad for x in (found.packed_mask, found.budget, found.variance))


def alike(case: Case) -> None:
    """Make neighbouring keys nearly equal, as in repetitive text."""
    case.k[:] = case.k[:, ::64].repeat_interleave(64, 1)[:, : case.k.shape[1]] + case.k * 1e-2


@pytest.mark.parametrize(
    ("length", "start", "make", "options"),
    [
        pytest.param(length, start, make, options, marks=ON_GPU)
        for length, start, make, options in [
            (20000, 0, None, {"biases": True}),
            (20001, 4097, None, {"documents": True, "batch": 2}),
            (33000, 0, None, {"activation": "relu"}),
            (33000, 30001, alike, {}),
            (33000, 24576, saturated, {}),
            (20000, 16384, all_equal, {}),
            (20000, 0, zeros, {"activation": "relu"}),
            (12000, 8192, None, {"dtype": torch.float32}),
            (131072, 0, None, {}),
            (131072, 98304, None, {"documents": True}),
            (131072, 98304, None, EIGHT_HEADS | {"documents": True}),
            (33000, 24576, all_equal, EIGHT_HEADS),
            (33000, 30001, alike, EIGHT_HEADS | {"dim": 128}),
        ]
    ],
)
def test_long_rows(length: int, start: int, make: Any, options: dict[str, Any], failures: list[int]) -> None:
    """Some rows are compared with a sort of their scores. Small chunks and key lists give the same bits."""
    case = make_case("cuda", length, **{"heads": 4, "dim": 64, "dtype": torch.bfloat16} | options)
    if make is not None:
        make(case)
    chunk, num_rows = case.queries_from(start, length), length - start
    found = chunk.select(FULL_RULE, 64, candidates_from=8192)
    if start > 0 and make is not alike:
        assert sum(failures) < 0.01 * num_rows  # these rows are also right, but slow
    assert_same_bits(chunk.select(FULL_RULE, 64, candidates_from=8192, row_chunk_bytes=64 * 2**20), found)
    for first in {0, 8170 if num_rows > 16384 else 0, num_rows // 2, num_rows - 64}:
        check(chunk, found, FULL_RULE, 64, range(first, first + 64))
    if start and start % 64 == 0:
        # For other starts, tiles hold other rows than in the whole sequence, and some rows are selected by all scores.
        whole = case.select(FULL_RULE, 64, candidates_from=8192)
        check_rows_of_whole(found, whole, start)
        assert torch.equal(found.variance, whole.variance[:, start:])
    listed = chunk.select(FULL_RULE, 64, lists_op.select_key_lists, candidates_from=8192)
    assert torch.equal(listed.budget, found.budget)
    assert torch.equal(listed.variance, found.variance)
    assert listed.key_lists is not None
    assert found.packed_mask is not None
    wanted = lists_op.key_lists_from_packed_mask(found.packed_mask, num_rows, start)
    assert torch.equal(listed.key_lists.counts, wanted.counts)
    for mine, theirs in zip(entries(listed.key_lists), entries(wanted), strict=True):
        assert torch.equal(mine, theirs)


def entries(lists: KeyLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `keys` and `words` tile by tile. The lists of several sequences are stored chunk by chunk."""
    counts = lists.counts.flatten().long()
    firsts = counts.cumsum(0) - counts
    places = torch.arange(int(counts.sum()), device=counts.device) - firsts.repeat_interleave(counts)
    places += lists.starts.flatten().repeat_interleave(counts)
    return lists.keys[places], lists.words[places]


@pytest.mark.parametrize("candidates_from", [pytest.param(each, marks=ON_GPU) for each in (None, 8192)])
def test_long_rows_that_see_few_keys(candidates_from: int | None) -> None:
    """A document after a long one selects all its keys until there are too many."""
    case = make_case("cuda", 40000, heads=4, dim=64, dtype=torch.bfloat16)
    starts = torch.zeros(1, 40000, dtype=torch.int32, device="cuda")
    starts[:, 34000:] = 34000
    case.geometry = Geometry(starts)
    rule = replace(FULL_RULE, dense_below=5000)
    selection = case.select(rule, candidates_from=candidates_from)
    for start in (4950, 33950, 38950, 39872):
        check(case, selection, rule, rows=range(start, start + 100))
    assert selection.budget[0, 38998] == 4999
    assert selection.budget[0, 38999] <= FULL_RULE.k_max
