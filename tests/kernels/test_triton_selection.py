"""Triton scores and selection: the same tests in the interpreter (CPU) and, marked gpu, on a CUDA device.

The selection is compared with a stable sort of the scores the kernels calculate themselves. One kernel keeps a
row in registers and one goes by groups of keys: lowering `REGISTER_KEYS` sends short rows through the second.
"""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from poison import poison_buffers

import gsa_kernels as ops

triton = pytest.importorskip("triton")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

from gsa_kernels import packed_mask  # noqa: E402
from gsa_kernels.selection import op, score_chunks  # noqa: E402

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU instead")
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
EMA = 0.02
RULE: dict[str, Any] = {"k_base": 12, "k_min": 4, "k_max": 20, "mode": "inverse"}
BY_REGISTERS, BY_GROUPS = 32768, 32
"""REGISTER_KEYS: rows at or beyond it go by groups."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa_kernels.selection import triton_select_long

    poison_buffers(monkeypatch, op, score_chunks, triton_select_long)


@dataclass
class Case:
    """Inputs of one indexer and the sequence they are for."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    options: dict[str, Any]

    def select(self, **changes: Any) -> op.Selection:
        ema = torch.tensor(EMA, device=self.q.device)
        return op.select_keys(self.q, self.k, self.w, ema, **{**self.options, **RULE, **changes})

    def scores(self) -> torch.Tensor:
        return op.score_rows(self.q, self.k, self.w, 0, self.q.shape[1], **self.options)

    def reference(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        options = {name: value for name, value in self.options.items() if name != "document_starts"}
        for name in ("score_bias", "weight_bias"):
            if options.get(name) is not None:
                options[name] = options[name].to(dtype)
        return ops.indexer_scores(self.q.to(dtype), self.k.to(dtype), self.w.to(dtype), **options)

    def visible(self) -> torch.Tensor:
        batch, length = self.q.shape[:2]
        starts = self.options.get("document_starts")
        mask = ops.causal_mask(length, document_ids=starts, device=self.q.device)
        return mask.expand(batch, length, length)


def make_case(
    device: str,
    length: int,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    activation: str = "sigmoid",
    biases: bool = False,
    documents: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed + length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    options: dict[str, Any] = {"activation": activation}
    if biases:
        options |= {"score_bias": draw(heads), "weight_bias": draw(heads)}
    if documents:
        first = torch.rand(batch, length, generator=generator) < 0.1
        first[:, 0] = True
        starts = torch.where(first, torch.arange(length), 0).cummax(1).values
        options["document_starts"] = starts.to(device=device, dtype=torch.int32)
    return Case(
        draw(batch, length, heads, dim), draw(batch, length, dim), draw(batch, length, heads), options
    )


def check(case: Case, selection: op.Selection, local_window: int = 0, **changes: Any) -> None:
    """Variance to rounding; budget, given the variance, and selection, given the scores, exactly."""
    rule = {**RULE, **changes}
    visible = case.visible()
    length = visible.shape[2]
    scores = torch.where(visible, case.scores(), 0)
    _, variance = ops.score_moments(scores, visible)
    torch.testing.assert_close(selection.variance, variance, rtol=1e-5, atol=1e-12)
    ema = torch.tensor(EMA, device=scores.device)
    budget = ops.adaptive_budget(selection.variance, ema, visible.sum(-1), **rule)
    assert torch.equal(selection.budget, budget.int())
    wanted = ops.select_top_k(scores, visible, budget)
    wanted |= ops.local_window_mask(length, local_window, device=scores.device) & visible
    assert torch.equal(packed_mask.unpack_mask(selection.words, length), wanted)
    assert torch.equal(packed_mask.pack_mask(wanted), selection.words)  # also the bits beyond the last key


def test_words_round_trip(device: str) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "heads", "dim", "biases"),
    [("sigmoid", 4, 64, True), ("sigmoid", 1, 24, False), ("relu", 8, 128, False)],
)
def test_scores_are_as_exact_as_torch(
    device: str, dtype: torch.dtype, activation: str, heads: int, dim: int, biases: bool
) -> None:
    case = make_case(device, 100, heads=heads, dim=dim, dtype=dtype, activation=activation, biases=biases)
    visible = case.visible()
    exact = case.reference()
    scores = case.scores()
    assert scores.dtype == torch.float32
    assert scores.shape == exact.shape
    if dtype == torch.float32:
        torch_error = (case.reference(torch.float32) - exact)[visible].abs()
    else:
        torch_error = (_scores_in_dtype(case) - exact)[visible].abs()
    error = (scores - exact)[visible].abs()
    # At the largest, and in the mean: single precision sums in another order differ by some ulp.
    assert error.max() <= 2 * torch_error.max() + 1e-7
    assert error.mean() <= 2 * torch_error.mean() + 1e-7


def _scores_in_dtype(case: Case) -> torch.Tensor:
    """Equation 7 with every operation in the dtype of the inputs, as a torch module in half precision does."""
    weights, bias = case.w, case.options.get("score_bias")
    if case.options["activation"] == "sigmoid":
        weight_bias = case.options.get("weight_bias")
        weights = torch.sigmoid(weights if weight_bias is None else weights + weight_bias)
    total = torch.zeros((), dtype=case.q.dtype, device=case.q.device)
    for head in range(case.q.shape[2]):
        logits = case.q[:, :, head] @ case.k.transpose(1, 2) * case.q.shape[3] ** -0.5
        if case.options["activation"] == "relu":
            activated = torch.relu(logits)
        else:
            activated = torch.sigmoid(logits if bias is None else logits + bias[head])
        total = total + weights[:, :, head, None] * activated
    return total


def test_score_rows_of_a_range_are_those_of_the_whole(device: str) -> None:
    case = make_case(device, 100, batch=2)
    rows = op.score_rows(case.q, case.k, case.w, 37, 90, **case.options)
    visible = case.visible()[:, 37:90]
    assert rows.shape == (2, 53, 100)
    assert torch.equal(rows[visible], case.scores()[:, 37:90][visible])


# selection


@pytest.mark.parametrize(
    ("length", "register_keys"),
    # Rows below 32 never go by groups.
    [(length, BY_REGISTERS) for length in (1, 17, 33, 100)] + [(33, BY_GROUPS), (70, BY_GROUPS)],
)
def test_selection_is_the_stable_sort_of_its_own_scores(
    device: str, length: int, register_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    case = make_case(device, length, dtype=dtype)
    check(case, case.select())


@pytest.mark.parametrize("register_keys", [BY_REGISTERS, BY_GROUPS])
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "off", "k_base": 1, "k_min": 1, "k_max": 1},
        {"mode": "off", "k_base": 7, "k_min": 7, "k_max": 7},
        {"mode": "off", "k_base": 1000, "k_min": 1, "k_max": 1000},  # t + 1: all visible keys
        {"mode": "direct"},
        {"mode": "direct", "k_min": 1, "k_max": 4000},
    ],
    ids=["one", "k_min", "all", "direct", "wide"],
)
def test_budgets(
    device: str, changes: dict[str, Any], register_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))
    case = make_case(device, 38)
    check(case, case.select(**changes), **changes)


def test_without_statistics_the_budget_is_k_base(device: str) -> None:
    case = make_case(device, 20)
    ema = torch.zeros((), device=device)
    selection = op.select_keys(case.q, case.k, case.w, ema, **case.options, **RULE)
    assert selection.budget[0].tolist() == [min(t + 1, RULE["k_base"]) for t in range(20)]


@pytest.mark.parametrize("register_keys", [BY_REGISTERS, BY_GROUPS])
@pytest.mark.parametrize("window", [0, 37])
def test_documents_and_window(
    device: str, window: int, register_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))
    case = make_case(device, 50, documents=True, biases=True)
    check(case, case.select(local_window=window), local_window=window)


@pytest.mark.parametrize("beta", [1.7, torch.tensor([60.0])], ids=["", "sharp"])
def test_log_sums_of_the_selection(device: str, beta: Any) -> None:
    """Of the scores selected from, over top-k and window, in documents; the rest of the result stays as it is."""
    if isinstance(beta, torch.Tensor):
        beta = beta.to(device)
    case = make_case(device, 40 if device == "cpu" else 3000, documents=True, biases=True)
    selection = case.select(local_window=5, inverse_temperature=beta)
    chosen = packed_mask.unpack_mask(selection.words, case.q.shape[1])
    wanted = (case.scores().double() * beta).masked_fill(~chosen, float("-inf")).logsumexp(-1)
    assert selection.log_sum is not None
    torch.testing.assert_close(selection.log_sum.double(), wanted, rtol=1e-6, atol=2e-6)
    plain = case.select(local_window=5)
    assert plain.log_sum is None
    assert torch.equal(plain.words, selection.words)


def test_log_sums_only_where_rows_are_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("cpu", 50)
    with pytest.raises(ValueError, match="candidates_from 64"):
        case.select(inverse_temperature=1.0, candidates_from=64)
    with pytest.raises(ValueError, match="one element"):
        case.select(inverse_temperature=torch.ones(2))
    monkeypatch.setattr(op, "REGISTER_KEYS", 32)
    with pytest.raises(ValueError, match="50 keys"):
        case.select(inverse_temperature=1.0)


def _two_levels(case: Case) -> None:
    """Every third key scores high, the others low: all ties."""
    case.k[:] = case.k[:, :1]
    case.k[:, ::3] *= -1


def _all_equal(case: Case) -> None:
    case.k[:] = 0


def _saturated(case: Case) -> None:
    """Sigmoids at 0 and 1, with few distinct sums."""
    case.q *= 1e3


def _negative_relu(case: Case) -> None:
    """Scores below, at and above zero; a zero times a negative weight is -0.0, and ties with 0.0."""
    case.options["activation"] = "relu"
    case.k[:, ::2] = 0


@pytest.mark.parametrize("register_keys", [BY_REGISTERS, BY_GROUPS])
@pytest.mark.parametrize("make", [_two_levels, _all_equal, _saturated, _negative_relu])
def test_ties_and_degenerate_rows(
    device: str, make: Any, register_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))
    case = make_case(device, 40)
    make(case)
    selection = case.select()
    check(case, selection)
    if make is _all_equal:
        assert not selection.variance.any()  # to the bit, not to rounding


def test_variance_does_not_cancel(device: str) -> None:
    """Scores near 2 that differ by 1e-5 of it."""
    case = make_case(device, 40)
    case.q *= 1e-4
    visible = case.visible()
    _, exact = ops.score_moments(torch.where(visible, case.scores(), 0).double(), visible)
    torch.testing.assert_close(case.select().variance.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("register_keys", [BY_REGISTERS, BY_GROUPS])
def test_future_tokens_chunks_and_repetition_change_no_bit(
    device: str, register_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128))
    case = make_case(device, 44)
    first = case.select(local_window=3)
    again = case.select(local_window=3, row_chunk_bytes=1)  # one tile of rows at a time
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    cut = 37
    for tensor in (case.q, case.k, case.w):
        tensor[:, cut:] = tensor[:, cut:].flip(1) * 3
    changed = case.select(local_window=3)
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(first, name)[:, :cut], getattr(changed, name)[:, :cut])
    assert not torch.equal(first.variance, changed.variance)


def test_batch_of_sequences(device: str) -> None:
    case = make_case(device, 34, batch=2, documents=True)
    check(case, case.select())


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 4096), (3, 1000), (1, 131072), (2, 40001)])
def test_chunks_cover_the_rows_within_their_bytes(batch: int, length: int) -> None:
    limit = 64 * 2**20
    chunks = list(score_chunks.row_chunks(batch, length, 64, limit))
    assert [row for chunk in chunks for row in chunk] == list(range(length))
    assert all(chunk.start % 64 == 0 for chunk in chunks)
    columns = [-(-chunk.stop // 128) * 128 for chunk in chunks]
    for chunk, width in zip(chunks, columns, strict=True):
        assert 4 * batch * len(chunk) * width <= limit or len(chunk) <= 64


def test_what_just_fits_is_one_chunk() -> None:
    for length, stride, query_start in ((4096, 1, 0), (4000, 1, 96), (1024, 4, 0)):
        columns = 4096
        limit = 4 * 8 * columns * length
        options = {"query_stride": stride, "query_start": query_start}
        assert list(score_chunks.row_chunks(8, length, 64, limit, **options)) == [range(length)]
        assert len(list(score_chunks.row_chunks(8, length, 64, limit - 1, **options))) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("length", "documents"), [(4096, False), (4000, True), (40000, False)])
def test_long_sequences(length: int, documents: bool) -> None:
    """At full size, on a sample of the rows."""
    case = make_case("cuda", length, heads=4, dim=64, dtype=torch.bfloat16, biases=True, documents=documents)
    rule = {"k_base": 2048, "k_min": 256, "k_max": 4096, "mode": "inverse"}
    selection = case.select(**rule)
    ema = torch.tensor(EMA, device="cuda")
    for start in (0, 2000, length - 128):
        rows = torch.arange(start, min(start + 128, length), device="cuda")
        visible = ops.causal_mask(
            length, query_positions=rows, document_ids=case.options.get("document_starts"), device="cuda"
        )
        scores = op.score_rows(case.q, case.k, case.w, start, start + 128, **case.options)
        scores = torch.where(visible, scores, 0)
        _, variance = ops.score_moments(scores, visible)
        torch.testing.assert_close(selection.variance[:, rows], variance, rtol=1e-5, atol=1e-12)
        budget = ops.adaptive_budget(selection.variance[:, rows], ema, visible.sum(-1), **rule)
        assert torch.equal(selection.budget[:, rows], budget.int())
        wanted = ops.select_top_k(scores, visible, budget)
        assert torch.equal(packed_mask.unpack_mask(selection.words[:, rows], length), wanted)


# errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_min": 30}, "k_max is 20, below k_min 30"),
        ({"k_base": 0}, "k_base is 0"),
        ({"mode": "reverse"}, "mode is 'reverse'"),
        ({"local_window": -1}, "local_window is -1"),
        ({"row_chunk_bytes": 0}, "row_chunk_bytes is 0"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"activation": "relu", "score_bias": torch.zeros(2)}, "score_bias is given with activation 'relu'"),
        ({"weight_bias": torch.zeros(3)}, "weight_bias has shape"),
        ({"document_starts": torch.zeros(1, 9, dtype=torch.int64)}, "document_starts has dtype torch.int64"),
        ({"document_starts": torch.zeros(1, 8, dtype=torch.int32)}, "document_starts has shape"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_case("cpu", 9).select(**changes)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda q: q.double(), "q_idx has dtype torch.float64"),
        ("k", lambda k: k.half(), "k_idx has dtype torch.float16 and q_idx torch.float32"),
        ("k", lambda k: k[:, 1:], "k_idx has shape"),
        ("w", lambda w: w[..., :1], "weight_logits has shape"),
        ("q", lambda q: q.repeat(1, 1, 5, 1), "weight_logits has shape|10 heads"),
    ],
)
def test_wrong_tensors_are_named(name: str, change: Any, message: str) -> None:
    case = make_case("cpu", 9)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        case.select()
