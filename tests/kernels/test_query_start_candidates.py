"""Selection by candidates for a run of queries from the middle of a sequence, as a context-parallel rank has it.

It is that of the same rows of the whole sequence, and that by all scores. In the interpreter with a sample of every
second key; on the GPU, at full size too.
"""

from typing import Any

import pytest
import torch
from poison import poison_buffers
from query_chunks import assert_same
from test_triton_selection import DEVICES, EMA, Case, make_case

import gsa_kernels as ops

pytest.importorskip("triton")

from gsa_kernels import limits, packed_mask
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists
from gsa_kernels.selection import candidates, lists_op, op, score_chunks, triton_guess, triton_select_long

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FULL_RULE: dict[str, Any] = {"k_base": 2048, "k_min": 256, "k_max": 4096, "mode": "inverse"}
RULE: dict[str, Any] = {"k_base": 5, "k_min": 2, "k_max": 8, "mode": "inverse"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, lists_op, candidates, triton_select_long)


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 keys are long, and 4 samples enough."""
    monkeypatch.setattr(op, "_TILE_MULTIPLE", 32)  # the tiles of fp32
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 64)
    monkeypatch.setattr(limits, "CANDIDATE_SAMPLE_STRIDE", 2)
    monkeypatch.setattr(triton_guess, "FEWEST_SAMPLES", 4)


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The chunks of rows that went by candidates."""
    chunks: list[range] = []
    select = op.select_by_candidates

    def recording(inputs: Any, sample: Any, rows: range, *args: Any) -> torch.Tensor:
        chunks.append(rows)
        return select(inputs, sample, rows, *args)

    monkeypatch.setattr(op, "select_by_candidates", recording)
    return chunks


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


def run_of(case: Case, start: int, stop: int) -> Case:
    """The queries from start to stop, and the keys up to there."""
    options = {**case.options, "query_start": start}
    if "document_starts" in options:
        options["document_starts"] = options["document_starts"][:, start:stop]
    return Case(case.q[:, start:stop], case.k[:, :stop], case.w[:, start:stop], options)


def check_exact(run: Case, found: op.Selection, first: int, last: int, window: int, **rule: Any) -> None:
    """Rows first .. last - 1 of a run: variance to rounding; budget, given it, and selection, given that, exactly."""
    start, num_keys = run.options["query_start"], run.k.shape[1]
    rows, keys = slice(first, last), torch.arange(num_keys, device=run.k.device)
    positions = start + torch.arange(first, last, device=run.k.device)
    visible = (keys <= positions[:, None]).expand(len(run.k), -1, -1)
    if "document_starts" in run.options:
        visible = visible & (keys >= run.options["document_starts"][:, rows, None])
    scores = torch.where(visible, op.score_rows(run.q, run.k, run.w, first, last, **run.options), 0)
    _, variance = ops.score_moments(scores, visible)
    torch.testing.assert_close(found.variance[:, rows], variance, rtol=1e-5, atol=1e-12)
    ema = torch.tensor(EMA, device=run.k.device)
    budget = ops.adaptive_budget(found.variance[:, rows], ema, visible.sum(-1), **rule)
    assert torch.equal(found.budget[:, rows], budget.int())
    wanted = ops.select_top_k(scores, visible, budget)
    wanted |= visible & (keys > positions[:, None] - window)
    assert torch.equal(packed_mask.pack_mask(wanted), found.words[:, rows])


def check_same(found: op.Selection, whole: op.Selection, start: int, variance: bool = True) -> None:
    """`found` is of the queries from `start` on, for all keys up to its last."""
    num_rows = found.budget.shape[1]
    rows, num_keys = slice(start, start + num_rows), start + num_rows
    mask = packed_mask.unpack_mask(whole.words[:, rows], 32 * whole.words.shape[2])[..., :num_keys]
    assert torch.equal(found.words, packed_mask.pack_mask(mask))
    assert torch.equal(found.budget, whole.budget[:, rows])
    if variance:
        assert_same(found.variance, whole.variance[:, rows])


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(
    ("start", "stop", "options", "changes"),
    [
        (64, 107, {}, {}),
        (33, 71, {"documents": True, "batch": 2}, {}),
        (64, 97, {"activation": "relu", "dtype": torch.float16}, {"mode": "direct"}),
        (32, 65, {"biases": True}, {"mode": "off", "k_base": 1, "k_min": 1, "k_max": 1}),
        (41, 75, {}, {"mode": "off", "k_base": 1000, "k_max": 1000}),
    ],
    ids=["sigmoid", "documents", "relu", "one", "all"],
)
def test_a_run_is_that_of_the_whole_and_that_by_all_scores(
    device: str,
    start: int,
    stop: int,
    options: dict[str, Any],
    changes: dict[str, Any],
    guessed: list[range],
    failures: list[int],
) -> None:
    case = make_case(device, 110, **options)
    rule, run = RULE | changes, run_of(case, start, stop)
    common = rule | {"local_window": 3}
    found = run.select(**common, candidates_from=32)
    assert guessed == [range(stop - start)]
    assert not any(failures)
    check_exact(run, found, 0, stop - start, 3, **rule)
    check_same(found, run_of(case, 0, stop).select(**common, candidates_from=32), start)
    check_same(found, run_of(case, 0, stop).select(**common), start, variance=False)


@pytest.mark.usefixtures("short_rows")
def test_the_first_rows_of_a_run_may_see_too_few_keys(
    device: str, guessed: list[range], failures: list[int]
) -> None:
    """The first rows by candidates begin a tile of rows; chunks of one tile; and the same as lists."""
    case = make_case(device, 100, documents=True)
    run = run_of(case, 17, 100)
    common = RULE | {"local_window": 3, "candidates_from": 64}
    found = run.select(**common)
    assert guessed == [range(64, 83)]  # of 47 rows and more in whole tiles
    check_exact(run, found, 0, 83, 3, **RULE)
    in_chunks = run.select(**common | {"candidates_from": 32}, row_chunk_bytes=1)
    assert guessed[1:] == [range(32, 64), range(64, 83)]
    for name in ("words", "budget"):
        assert torch.equal(getattr(in_chunks, name), getattr(found, name))
    assert torch.equal(in_chunks.variance[:, 64:], found.variance[:, 64:])
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
def test_short_documents_far_from_the_start(device: str, failures: list[int]) -> None:
    """The programs for the keys before them, 256 each, write nothing."""
    case = make_case(device, 600)
    positions = torch.arange(600, dtype=torch.int32)
    starts = torch.where(positions < 585, 530, 585)[None]
    case.options["document_starts"] = starts.to(device=device, dtype=torch.int32)
    run = run_of(case, 560, 600)
    found = run.select(**RULE, candidates_from=64, local_window=3)
    check_exact(run, found, 0, 40, 3, **RULE)
    assert not any(failures)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_lists_of_a_run(device: str, documents: bool, guessed: list[range]) -> None:
    """Without documents the words are not zeroed first: all that is read was written."""
    case = make_case(device, 100, documents=documents)
    run = run_of(case, 41, 100)
    common = RULE | {"local_window": 3, "candidates_from": 64, "row_chunk_bytes": 1}
    bits = run.select(**common)
    ema = torch.tensor(EMA, device=device)
    listed = lists_op.select_key_lists(run.q, run.k, run.w, ema, **run.options, **common)
    assert guessed == [range(32, 59)] * 2
    assert torch.equal(mask_from_key_lists(listed.lists), packed_mask.unpack_mask(bits.words, 100))
    assert torch.equal(listed.budget, bits.budget)
    assert torch.equal(listed.variance, bits.variance)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_rows_that_are_done_again(
    device: str, documents: bool, failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows' guesses let too few keys through, and others' too many."""
    guess = candidates.guess_thresholds

    def wrong(*args: Any) -> None:
        guess(*args)
        args[-1][:, ::3, 0] = 1e9
        args[-1][:, 1::3, 0] = -1e9

    monkeypatch.setattr(candidates, "guess_thresholds", wrong)
    monkeypatch.setattr(limits, "candidate_room", lambda k_max: 64)
    case = make_case(device, 100, documents=documents)
    common = RULE | {"local_window": 3, "candidates_from": 64}
    run = run_of(case, 65, 100)
    found = run.select(**common)
    assert failures == [(24 if not documents else 12)]
    check_exact(run, found, 0, 35, 3, **RULE)


def _all_equal(case: Case) -> None:
    case.k[:] = 0


def _two_levels(case: Case) -> None:
    case.k[:] = case.k[:, :1]
    case.k[:, ::3] *= -1


def _saturated(case: Case) -> None:
    case.q *= 1e3


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("make", [_all_equal, _two_levels, _saturated])
def test_ties(device: str, make: Any, failures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More equal scores than there is room for; the candidates are the first of them."""
    monkeypatch.setattr(limits, "candidate_room", lambda k_max: 64)
    case = make_case(device, 150)
    make(case)
    run = run_of(case, 118, 150)
    found = run.select(**RULE, candidates_from=64)
    check_exact(run, found, 0, 32, 0, **RULE)
    if make is _all_equal:
        assert not found.variance.any()  # to the bit, not to rounding
    assert not any(failures)


@pytest.mark.parametrize("stride", [2, 32])
def test_the_sample_does_not_depend_on_where_the_keys_end(
    stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CANDIDATE_SAMPLE_STRIDE", stride)
    case = make_case("cpu", 200)
    _, every = candidates.sample_keys(op.score_inputs(case.q, case.k, case.w))
    assert torch.equal(every // stride, torch.arange(len(every), dtype=torch.int32))  # one of each group
    for stop in range(1, 200, 7):
        run = run_of(case, 0, stop)
        inputs, sampled = candidates.sample_keys(op.score_inputs(run.q, run.k, run.w))
        assert torch.equal(sampled, every[every < stop])
        assert torch.equal(inputs.k_idx, case.k[:, sampled.long()])


def test_no_gradient(device: str) -> None:
    run = run_of(make_case(device, 70), 64, 70)
    for leaf in (run.q, run.k, run.w):
        leaf.requires_grad_()
    found = run.select(**RULE, candidates_from=64)
    assert not any(x.requires_grad for x in (found.words, found.budget, found.variance))


@pytest.mark.parametrize(
    ("length", "start", "make", "options"),
    [
        pytest.param(length, start, make, options, marks=ON_GPU)
        for length, start, make, options in [
            (20000, 16384, None, {"biases": True}),
            (20001, 4097, None, {"documents": True, "batch": 2}),
            (33000, 30001, None, {"activation": "relu"}),
            (33000, 24576, _saturated, {}),
            (20000, 16384, _all_equal, {"dtype": torch.float16}),
            (12000, 8192, None, {"dtype": torch.float32}),
            (131072, 114688, None, {}),
            (131072, 98304, None, {"documents": True}),
        ]
    ],
)
def test_long_runs(length: int, start: int, make: Any, options: dict[str, Any], failures: list[int]) -> None:
    """At full size: all rows beside those of the whole, some beside a sort of their scores; bits and lists."""
    case = make_case("cuda", length, heads=4, dim=64, **{"dtype": torch.bfloat16} | options)
    if make is not None:
        make(case)
    common = FULL_RULE | {"candidates_from": 8192, "local_window": 64}
    run = run_of(case, start, length)
    found = run.select(**common)
    assert sum(failures) < 0.01 * (length - start)  # those are right, too, but slow
    again = run.select(**common, row_chunk_bytes=64 * 2**20)
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(found, name), getattr(again, name))
    num_rows = length - start
    for first in (0, num_rows // 2, num_rows - 64):
        check_exact(run, found, first, first + 64, 64, **FULL_RULE)
    if start % 64 == 0:
        # Else tiles of rows hold other rows, and some rows before 8192 are selected by all scores.
        whole = case.select(**common)
        check_same(found, whole, start)
        assert torch.equal(found.variance, whole.variance[:, start:])
    ema = torch.tensor(EMA, device="cuda")
    listed = lists_op.select_key_lists(run.q, run.k, run.w, ema, **run.options, **common)
    assert torch.equal(listed.budget, found.budget)
    assert torch.equal(listed.variance, found.variance)
    wanted = lists_op.key_lists_from_words(found.words, num_rows, start)
    assert torch.equal(listed.lists.counts, wanted.counts)
    for mine, theirs in zip(entries(listed.lists), entries(wanted), strict=True):
        assert torch.equal(mine, theirs)


def entries(lists: KeyLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and words, tile by tile: several sequences' chunks of rows stand in memory one chunk after the other."""
    assert not lists.full.any()
    counts = lists.counts.flatten().long()
    firsts = counts.cumsum(0) - counts
    places = torch.arange(int(counts.sum()), device=counts.device) - firsts.repeat_interleave(counts)
    keys, words = lists.key_starts.flatten(), lists.word_starts.flatten()
    return (
        lists.keys[keys.repeat_interleave(counts) + places],
        lists.words[words.repeat_interleave(counts) + places],
    )
