"""Tests Triton's scores and selection in the interpreter (CPU) and, marked gpu, on a CUDA device.

The expected selection comes from a stable sort of the scores that the kernels have computed. One kernel keeps a row of
scores in registers. For rows of more than `REGISTER_KEYS` keys there is a second kernel, which first compares the
maxima of groups of keys. Tests that set a low `REGISTER_KEYS` run the second kernel on short rows, too.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from covering import covered
from kernel_devices import ON_GPU
from poison import poison_buffers
from selection_cases import (
    BY_GROUPS,
    BY_REGISTERS,
    FULL_RULE,
    RULE,
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

from gsa_kernels import packed_mask
from gsa_kernels import reference as ops
from gsa_kernels.indexer import triton_scores
from gsa_kernels.indexer.score_inputs import score_inputs
from gsa_kernels.selection import op, score_chunks, triton_select_long
from gsa_kernels.types import BudgetRule, Geometry, Indexer


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, triton_select_long)


@pytest.fixture
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _select_by(request.param, monkeypatch)


both_methods = pytest.mark.parametrize(
    "method", [BY_REGISTERS, BY_GROUPS], ids=["registers", "groups"], indirect=True
)


def _select_by(register_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))


def test_packed_mask_round_trip(device: str) -> None:
    mask = torch.rand(2, 3, 70, device=device) < 0.5
    mask[0, 0] = True
    words = packed_mask.pack_mask(mask)
    assert words.shape == (2, 3, 3)
    assert words.dtype == torch.int32
    assert words[0, 0].tolist() == [-1, -1, 2**6 - 1]
    assert torch.equal(packed_mask.unpack_mask(words, 70), mask)
    for t, s in ((1, 2), (2, 31), (0, 32)):
        assert bool(words[1, t, s // 32] >> (s % 32) & 1) == bool(mask[1, t, s])


# scores


SIGMOID: dict[str, Any] = {"heads": 4, "dim": 64, "biases": True}
WIDE: dict[str, Any] = {"activation": "relu", "heads": 8, "dim": 128}


@pytest.mark.parametrize(
    ("kib", "dtype", "indexer"),
    [
        (227, torch.float32, SIGMOID),
        (227, torch.float32, WIDE),
        (99, torch.bfloat16, {"heads": 1, "dim": 24}),
        (227, torch.bfloat16, SIGMOID),
        (227, torch.bfloat16, WIDE),
        (99, torch.bfloat16, WIDE),
    ],
)
def test_scores_are_as_exact_as_torch(
    device: str, kib: int, dtype: torch.dtype, indexer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kib` is the shared memory of the GPU: with Ada's 99 KiB wide heads have smaller tiles."""
    monkeypatch.setattr(triton_scores, "shared_memory", lambda _: kib * 1024)
    case = make_case(device, 100, dtype=dtype, **indexer)
    causal, exact, scores = case.causal(), case.reference(), case.scores()
    assert scores.dtype == torch.float32
    assert scores.shape == exact.shape
    if dtype == torch.float32:
        torch_error = (case.reference(torch.float32) - exact)[causal].abs()
    else:
        torch_error = (_scores_in_dtype(case) - exact)[causal].abs()
    error = (scores - exact)[causal].abs()
    # Maximum and mean are compared, because fp32 sums in another order differ by some ulp.
    assert error.max() <= 2 * torch_error.max() + 1e-7
    assert error.mean() <= 2 * torch_error.mean() + 1e-7


@pytest.mark.parametrize(("kib", "tile"), [(227, (64, 3)), (163, (64, 2)), (99, (32, 1))])
def test_tiles_of_wide_heads_fit(kib: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scores, "shared_memory", lambda _: kib * 1024)
    bf16, fp32 = (
        score_inputs(make_case("cpu", 4, dtype=dtype, **WIDE).indexer, Geometry())
        for dtype in (torch.bfloat16, torch.float32)
    )
    found = triton_scores.score_tiles(bf16)
    assert (found.rows, found.stages) == tile
    if kib == 99:
        with pytest.raises(ValueError, match="need 160 KiB of shared memory, and the GPU has 99"):
            triton_scores.score_tiles(fp32)


def _scores_in_dtype(case: Case) -> torch.Tensor:
    """Compute the scores with every operation in the dtype of the inputs, as a torch module in half precision does."""
    x = case.indexer
    weights = x.head_weight_logits
    if x.activation == "sigmoid":
        weights = torch.sigmoid(weights if x.head_weight_bias is None else weights + x.head_weight_bias)
    total = torch.zeros((), dtype=case.q.dtype, device=case.q.device)
    for head in range(case.q.shape[2]):
        logits = case.q[:, :, head] @ case.k.transpose(1, 2) * case.q.shape[3] ** -0.5
        if x.activation == "relu":
            activated = torch.relu(logits)
        else:
            activated = torch.sigmoid(logits if x.score_bias is None else logits + x.score_bias[head])
        total = total + weights[:, :, head, None] * activated
    return total


# selection

RULES = {
    "inverse": RULE, "direct": replace(RULE, adaptive_k="direct"), "wide": BudgetRule(12, 1, 4000, "direct"),
    "one": BudgetRule(1, 1, 1, "off"), "seven": BudgetRule(7, 7, 7, "off"),
    "all": BudgetRule(1000, 1, 1000, "off"), "dense below": replace(RULE, dense_below=30),
}  # fmt: skip


@covered(
    "options",
    rule=list(RULES),
    length=[1, 17, 37],  # rows below 32 are never selected by groups
    method=[BY_REGISTERS, BY_GROUPS],
    documents=[False, True],
    window=[0, 37],
    batch=[1, 2],
    dtype=[torch.float32, torch.bfloat16],
)
def test_selection_is_the_stable_sort_of_its_own_scores(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _select_by(options["method"], monkeypatch)
    rule, window = RULES[options["rule"]], options["window"]
    names = ("length", "documents", "batch", "dtype")
    case = make_case(device, biases=options["documents"], **{name: options[name] for name in names})
    check(case, case.select(rule, window), rule, window)


def test_without_statistics_the_budget_is_k_base(device: str) -> None:
    case = make_case(device, 20)
    selection = op.select_keys(case.indexer, RULE, torch.zeros((), device=device))
    assert selection.budget[0].tolist() == [min(t + 1, RULE.k_base) for t in range(20)]


@pytest.mark.parametrize("beta", [1.7, torch.tensor([60.0])], ids=["", "sharp"])
def test_log_sums_of_the_selection(device: str, beta: Any) -> None:
    """The log-sums cover the selected scores, of top-k and window; other results do not change."""
    if isinstance(beta, torch.Tensor):
        beta = beta.to(device)
    case = make_case(device, 40 if device == "cpu" else 3000, documents=True, biases=True)
    case.indexer = replace(case.indexer, inverse_temperature=beta)
    selection = case.select(window=5, with_log_sum=True)
    assert selection.packed_mask is not None
    chosen = packed_mask.unpack_mask(selection.packed_mask, case.q.shape[1])
    wanted = (case.scores().double() * beta).masked_fill(~chosen, float("-inf")).logsumexp(-1)
    assert selection.log_sum is not None
    torch.testing.assert_close(selection.log_sum.double(), wanted, rtol=1e-6, atol=2e-6)
    plain = case.select(window=5)
    assert plain.log_sum is None
    assert_same_bits(plain, selection)


def test_log_sums_only_where_rows_are_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("cpu", 50)
    with pytest.raises(ValueError, match="candidates_from 64"):
        case.select(with_log_sum=True, candidates_from=64)
    monkeypatch.setattr(op, "REGISTER_KEYS", 32)
    with pytest.raises(ValueError, match="50 keys"):
        case.select(with_log_sum=True)


def negative_relu(case: Case) -> None:
    """Give scores below, at and above zero; zero times a negative weight is -0.0, which ties with 0.0."""
    case.indexer = replace(case.indexer, activation="relu")
    case.k[:, ::2] = 0


@both_methods
@pytest.mark.parametrize("make", [two_levels, all_equal, saturated, negative_relu])
def test_ties_and_degenerate_rows(device: str, make: Any, method: None) -> None:
    case = make_case(device, 36)
    make(case)
    selection = case.select()
    check(case, selection)
    if make is all_equal:
        assert not selection.variance.any()  # to the bit, not up to rounding


@pytest.mark.parametrize("levels", [3, 40, 10**6], ids=["ties everywhere", "some ties", "no ties"])
@pytest.mark.parametrize("start", [0, 1021])
def test_clusters_of_groups(device: str, levels: int, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have more groups than one program searches. A low limit makes 4096 keys suffice."""
    monkeypatch.setattr(triton_select_long, "_MOST_GROUPS", 128)
    monkeypatch.setattr(triton_select_long, "_SMALLEST_LIST", 16)
    length, rows = 4096, range(4061, 4096)
    case = make_case(device, length, documents=True)
    starts = torch.full((1, length), start, dtype=torch.int32, device=device)
    geometry = replace(case.geometry, document_starts=starts)
    rule = BudgetRule(9, 2, 30, "inverse")
    selector = op.Selector(case.indexer, rule, case.ema, geometry, 2**20, None)
    outputs = op.new_outputs(selector.inputs)
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (1, len(rows), length), generator=generator).float().to(device)
    # Rows have different variances, and so different budgets.
    spread = 1.0 + torch.arange(len(rows), device=device)[:, None] % 3
    scores = scores * (spread * (6 * case.ema).sqrt() / levels)
    triton_select_long.select_long_rows(selector.criteria, scores, rows.start, rows, length, outputs)
    visible = replace(case, geometry=geometry).causal(rows)
    budget = outputs.budget[:, rows.start : rows.stop]
    assert len(budget.unique()) > 1
    wanted = ops.select_top_k(torch.where(visible, scores, 0), visible, budget.long())
    assert torch.equal(outputs.packed_mask[:, rows.start : rows.stop], packed_mask.pack_mask(wanted))


def test_a_million_keys(device: str) -> None:
    """Rows have more groups than one program searches, without a lower limit."""
    length, rows = 2**20, 3
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, rows, 1, 16), (1, length, 16), (1, rows, 1))
    indexer = Indexer(*(torch.randn(shape, generator=generator).to(device) for shape in shapes))
    geometry = Geometry(query_start=length - rows)
    selector = op.Selector(indexer, FULL_RULE, torch.ones((), device=device), geometry, 2**24, None)
    outputs = op.new_outputs(selector.inputs)
    scores = torch.randn((1, rows, length), generator=generator)
    scores[:, 1] = (4 * scores[:, 1]).round() / 4  # hundreds of thousands of ties
    scores = scores.to(device)
    triton_select_long.select_long_rows(selector.criteria, scores, 0, range(rows), length, outputs)
    keys = torch.arange(length, device=device)
    visible = keys <= geometry.query_start + torch.arange(rows, device=device)[:, None]
    wanted = ops.select_top_k(torch.where(visible, scores, 0), visible[None], outputs.budget.long())
    assert torch.equal(outputs.packed_mask, packed_mask.pack_mask(wanted))


def test_variance_does_not_cancel(device: str) -> None:
    check_variance_of_like_scores(make_case(device, 40))


@both_methods
def test_future_tokens_chunks_and_repetition_change_no_bit(device: str, method: None) -> None:
    check_no_bit_changes(make_case(device, 38), 33)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 4096), (3, 1000), (1, 131072), (2, 40001)])
def test_chunks_cover_the_rows_within_their_bytes(batch: int, length: int) -> None:
    limit = 64 * 2**20
    chunks = list(score_chunks.row_chunks(batch, length, 64, limit))
    assert [row for chunk in chunks for row in chunk] == list(range(length))
    assert all(chunk.start % 64 == 0 for chunk in chunks)
    columns = [-(-chunk.stop // 128) * 128 for chunk in chunks]
    for chunk, width in zip(chunks, columns, strict=True):
        assert 4 * batch * len(chunk) * width <= limit or len(chunk) <= 64
    for length, query_start in ((4096, 0), (4000, 96)):  # what just fits is one chunk
        limit = 4 * 8 * 4096 * length
        assert list(score_chunks.row_chunks(8, length, 64, limit, query_start)) == [range(length)]
        assert len(list(score_chunks.row_chunks(8, length, 64, limit - 1, query_start))) > 1


@pytest.mark.parametrize(
    ("length", "documents"),
    [pytest.param(*values, marks=ON_GPU) for values in [(4096, False), (4000, True), (40000, False)]],
)
def test_long_sequences(length: int, documents: bool) -> None:
    """Rows have full size; a sample is compared."""
    case = make_case("cuda", length, heads=4, dim=64, dtype=torch.bfloat16, biases=True, documents=documents)
    selection = case.select(FULL_RULE)
    for start in (0, 2000, length - 128):
        check(case, selection, FULL_RULE, rows=range(start, start + 128))


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "local_window is -1"),
        ({"row_chunk_bytes": 0}, "row_chunk_bytes is 0"),
        ({"candidates_from": 63}, "candidates_from is 63"),
    ],
)
def test_wrong_options_are_named(device: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_case(device, 9).select(**options)
    with pytest.raises(ValueError, match="has 9 heads; pass 1 to 8"):
        make_case(device, 9, heads=9).select()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "queries",
            lambda x: x.half(),
            r"dtype torch\.float16; pass bfloat16 or float32, or use implementation",
        ),
        ("queries", lambda x: x.double(), r"indexer.queries has dtype torch\.float64"),
        (
            "keys",
            lambda x: x.bfloat16(),
            r"indexer.keys has dtype torch\.bfloat16 and its queries torch\.float32",
        ),
        ("keys", lambda x: x[:, 1:], r"indexer\.keys has shape"),
        ("queries", lambda x: x[..., :8], "keys has shape"),
        ("head_weight_logits", lambda x: x.double(), r"indexer\.head_weight_logits has dtype torch\.float64"),
        ("head_weight_logits", lambda x: x[..., :1], "head_weight_logits has shape"),
        ("head_weight_bias", lambda x: torch.zeros(3), "head_weight_bias has shape"),
        ("inverse_temperature", lambda x: torch.ones(2), "one element"),
        ("activation", lambda x: "tanh", "activation is 'tanh'"),
    ],
)
def test_wrong_indexers_are_named(device: str, name: str, change: Any, message: str) -> None:
    case = make_case(device, 9)
    with pytest.raises(ValueError, match=message):
        replace(case, indexer=replace(case.indexer, **{name: change(getattr(case.indexer, name))})).select()
