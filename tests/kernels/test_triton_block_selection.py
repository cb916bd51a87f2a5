"""Compares selections that blocks of queries share, as key lists, with the torch references. The tests run in the
interpreter (CPU) and, marked gpu, on a CUDA device. The expected selection is a stable sort of the kernels' scores."""

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from poison import poison_buffers
from selection_cases import BY_GROUPS, BY_REGISTERS, EMA, FULL_RULE, ON_GPU, RULE

from gsa_kernels import packed_mask
from gsa_kernels import reference as ops
from gsa_kernels.key_lists import triton_block_lists
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists
from gsa_kernels.selection import block_op, op, score_chunks, triton_block_mask
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa_kernels.selection import triton_select_long

    poison_buffers(monkeypatch, op, score_chunks, triton_select_long, triton_block_lists, triton_block_mask)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 64)


@dataclass
class Case:
    """Holds the projections of every token; the first query of every block selects."""

    of_tokens: Indexer
    geometry: Geometry

    @property
    def indexer(self) -> Indexer:
        return self.of_tokens.of_block_leaders(self.geometry.selection_block)

    @property
    def length(self) -> int:
        return self.of_tokens.keys.shape[1]

    def select(self, rule: BudgetRule = RULE, **options: Any) -> Selection:
        ema = torch.tensor(EMA, device=self.of_tokens.keys.device)
        return block_op.select_block_lists(self.indexer, rule, ema, self.geometry, **options)

    def top_k(self, rule: BudgetRule = RULE, **options: Any) -> torch.Tensor:
        ema = torch.tensor(EMA, device=self.of_tokens.keys.device)
        found = op.select_keys(self.indexer, rule, ema, self.geometry, **options).packed_mask
        assert found is not None
        return found

    def attended(self, top_k: torch.Tensor, queries: range) -> torch.Tensor:
        """Return S_t of these queries, bool [B, queries, L], from the top-k of the rows, bool [B, R, L]."""
        positions = torch.tensor(queries, device=top_k.device)
        starts = self.geometry.document_starts
        window = ops.local_window_mask(self.length, self.geometry.local_window, query_positions=positions)
        causal = ops.causal_mask(self.length, query_positions=positions, document_ids=starts)
        return (top_k[:, positions // self.geometry.selection_block] | window) & causal


def make_case(
    device: str,
    length: int,
    block: int,
    window: int,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    documents: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    starts = None
    if documents:
        first = torch.rand(batch, length, generator=generator) < 0.04
        first[:, 0] = True
        starts = torch.where(first, torch.arange(length), 0).cummax(1).values.to(device, torch.int32)
    tensors = (draw(batch, length, heads, dim), draw(batch, length, dim), draw(batch, length, heads))
    return Case(Indexer(*tensors), Geometry(starts, 0, block, window))


def check(case: Case, rule: BudgetRule = RULE) -> None:
    """Check variance up to rounding, budget given the variance, and selection given the scores."""
    block, starts, length = case.geometry.selection_block, case.geometry.document_starts, case.length
    batch, device = len(case.of_tokens.keys), case.of_tokens.keys.device
    selection = case.select(rule)
    positions = torch.arange(0, length, block, device=device)
    causal = ops.causal_mask(length, query_positions=positions, document_ids=starts)
    causal = causal.expand(batch, -1, -1)
    scores = op.score_rows(case.indexer, range(len(positions)), case.geometry)
    scores = torch.where(causal, scores, 0)
    _, variance = ops.score_moments(scores, causal)
    torch.testing.assert_close(selection.variance, variance, rtol=1e-5, atol=1e-12)
    ema = torch.tensor(EMA, device=device)
    budget = ops.adaptive_budget(selection.variance, ema, causal.sum(-1), **asdict(rule))
    assert torch.equal(selection.budget, budget.int())
    top = ops.select_top_k(scores, causal, budget)
    assert torch.equal(case.top_k(rule), packed_mask.pack_mask(top))

    lists, wanted = on_cpu(selection.key_lists), case.attended(top, range(length))
    assert torch.equal(mask_from_key_lists(lists), wanted.cpu())
    check_format(case, lists)

    masked = block_op.select_block_mask(case.indexer, rule, ema, case.geometry)
    assert masked.packed_mask is not None
    assert torch.equal(masked.packed_mask, packed_mask.pack_mask(wanted))
    assert torch.equal(masked.budget, selection.budget)
    assert torch.equal(masked.variance, selection.variance)


def on_cpu(lists: KeyLists | None) -> KeyLists:
    """Copy lists to the CPU, for loops over the tiles."""
    assert lists is not None
    tensors = {name: value.cpu() for name, value in vars(lists).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(lists, **tensors)


def check_format(case: Case, lists: KeyLists) -> None:
    """Check what attention requires beyond the mask: bounds, order, shared keys, and a full part where possible."""
    starts, block = case.geometry.document_starts, case.geometry.selection_block
    starts = None if starts is None else starts.cpu()
    assert lists.queries == min(block, 32)
    assert lists.length == case.length
    assert int(lists.counts.max()) <= lists.max_count <= lists.length
    per_block = block // lists.queries
    for b in range(lists.counts.shape[0]):
        for tile in range(lists.counts.shape[1]):
            count, full = int(lists.counts[b, tile]), int(lists.full[b, tile])
            start, first = int(lists.key_starts[b, tile]), tile // per_block * per_block
            assert start == lists.key_starts[b, first]
            assert count == lists.counts[b, first]
            keys = lists.keys[start : start + count]
            assert start + count <= lists.keys.numel()
            assert lists.word_starts[b, tile] + count - full <= lists.words.numel()
            assert (keys.diff() > 0).all()
            t0, last = first * lists.queries, min((tile + 1) * lists.queries, lists.length) - 1
            if starts is None or int(starts[b, last]) <= t0:
                document = 0 if starts is None else int(starts[b, t0])
                window_from = max(t0 - case.geometry.local_window + 1, document)
                assert full == int((keys < window_from).sum())
            else:
                assert full == 0


@pytest.mark.parametrize(
    ("block", "window", "length", "documents"),
    [
        (16, 16, 75, True),
        (32, 32, 33, False),
        (32, 64, 170, True),
        (64, 100, 150, False),
        (64, 64, 150, True),
        (128, 128, 140, False),
        (128, 200, 20, True),
    ],
)
def test_lists_are_the_reference_selection(
    device: str, block: int, window: int, length: int, documents: bool
) -> None:
    check(make_case(device, length, block, window, batch=1 + documents, documents=documents))


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [pytest.param(block, marks=ON_GPU) for block in (16, 32, 64, 128)])
def test_many_shapes(block: int, documents: bool) -> None:
    for window in sorted({block, 2 * block, max(100, block)}):
        for dtype, length in ((torch.float32, 31), (torch.bfloat16, 129), (torch.bfloat16, 1537)):
            check(make_case("cuda", length, block, window, batch=2, dim=64, dtype=dtype, documents=documents))


def test_a_chunk_of_queries_matches_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 32)
    whole, x = make_case(device, 70, 16, 20), make_case(device, 70, 16, 20).of_tokens
    later = Indexer(x.queries[:, 16:], x.keys, x.head_weight_logits[:, 16:])
    found, wanted = Case(later, Geometry(None, 16, 16, 20)).select(), whole.select()
    assert torch.equal(found.budget, wanted.budget[:, 1:])
    torch.testing.assert_close(found.variance, wanted.variance[:, 1:], rtol=1e-6, atol=0)
    masks = [mask_from_key_lists(on_cpu(each.key_lists)) for each in (found, wanted)]
    assert torch.equal(masks[0], masks[1][:, 16:])


@pytest.mark.parametrize(
    "rule",
    [
        BudgetRule(1, 1, 1, "off"),
        BudgetRule(1000, 1, 1000, "off"),
        BudgetRule(12, 1, 4000, "direct"),
        BudgetRule(12, 4, 20, dense_below=90),
    ],
    ids=["one", "all", "wide", "dense below"],
)
def test_budgets(device: str, rule: BudgetRule) -> None:
    check(make_case(device, 150, 32, 40), rule)


@pytest.mark.parametrize(
    ("levels", "register_keys"), [("equal", BY_REGISTERS), ("two", BY_REGISTERS), ("two", BY_GROUPS)]
)
def test_ties(device: str, levels: str, register_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two selection kernels choose the first of equal scores."""
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128) // 4)
    case = make_case(device, 90, 16, 20)
    keys = case.of_tokens.keys
    keys[:] = 0 if levels == "equal" else keys[:, :1]
    if levels == "two":
        keys[:, ::3] *= -1
    check(case, BudgetRule(15, 15, 20, "off"))


def test_future_tokens_chunks_and_repetition_change_no_bit(device: str) -> None:
    case = make_case(device, 160, 16, 24, documents=True)
    first, again = case.select(), case.select(row_chunk_bytes=1)
    for name in ("budget", "variance"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    for name in ("keys", "words", "key_starts", "word_starts", "full", "counts"):
        assert torch.equal(getattr(first.key_lists, name), getattr(again.key_lists, name)), name
    before = mask_from_key_lists(on_cpu(first.key_lists))
    cut, x = 101, case.of_tokens
    for tensor in (x.queries, x.keys, x.head_weight_logits):
        tensor[:, cut:] = tensor[:, cut:].flip(1) * 3
    changed = mask_from_key_lists(on_cpu(case.select().key_lists))
    assert torch.equal(before[:, :cut], changed[:, :cut])
    assert not torch.equal(before, changed)


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [pytest.param(block, marks=ON_GPU) for block in (32, 128)])
def test_long_sequences(block: int, documents: bool) -> None:
    """The key lists must select the same keys as the top-k. The sequence is so long that every selection kernel runs
    and that the rows are split into chunks. The test never builds an L x L mask."""
    length = 40001
    case = make_case("cuda", length, block, block, heads=4, dim=64, dtype=torch.bfloat16)
    if documents:
        starts = torch.zeros(1, length, dtype=torch.int32, device="cuda")
        for start in (7, 5000, 36011):
            starts[:, start:] = start
        case.geometry = dataclasses.replace(case.geometry, document_starts=starts)
    rule = dataclasses.replace(FULL_RULE, k_base=1024)
    packed_top_k = case.top_k(rule)
    assert torch.equal(case.top_k(rule, row_chunk_bytes=2**26), packed_top_k)
    lists = case.select(rule, row_chunk_bytes=2**26).key_lists
    assert lists is not None
    rows = torch.arange(lists.queries, device="cuda", dtype=torch.int32)
    for tile in range(0, lists.counts.shape[1], 17):
        count, full = int(lists.counts[0, tile]), int(lists.full[0, tile])
        start, word_start = int(lists.key_starts[0, tile]), int(lists.word_starts[0, tile])
        keys = lists.keys[start : start + count].long()
        hits = lists.words[word_start : word_start + count - full][None] >> rows[:, None] & 1
        mask = torch.zeros(lists.queries, length, dtype=torch.bool, device="cuda")
        mask[:, keys] = torch.cat([torch.ones_like(keys[:full]).expand(lists.queries, -1), hits], 1).bool()
        queries = range(tile * lists.queries, min((tile + 1) * lists.queries, length))
        top_k = torch.zeros(1, packed_top_k.shape[1], length, dtype=torch.bool, device="cuda")
        row = queries.start // block
        top_k[:, row] = packed_mask.unpack_mask(packed_top_k[:, row], length)
        assert torch.equal(mask[: len(queries)], case.attended(top_k, queries)[0])


def test_wrong_blocks_are_named(device: str) -> None:
    indexer, ema = make_case(device, 40, 16, 16).indexer, torch.tensor(EMA, device=device)
    for geometry, message in (
        (Geometry(selection_block=8, local_window=8), "selection_block is 8; pass one of"),
        (Geometry(selection_block=32, local_window=32), r"indexer\.queries has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            block_op.select_block_lists(indexer, RULE, ema, geometry)
