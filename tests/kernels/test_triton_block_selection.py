"""Selections that blocks of queries share, as lists, against the torch references.

In the interpreter (CPU) and, marked gpu, on a CUDA device. The selection is compared with a stable sort of the
scores the kernels calculate themselves.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from poison import poison_buffers

import gsa_kernels as ops

triton = pytest.importorskip("triton")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from gsa_kernels import packed_mask  # noqa: E402
from gsa_kernels.key_lists import triton_block_lists  # noqa: E402
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists  # noqa: E402
from gsa_kernels.selection import block_op, op, score_chunks  # noqa: E402

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
gpu_only = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EMA = 0.02
RULE: dict[str, Any] = {"k_base": 12, "k_min": 4, "k_max": 20, "mode": "inverse"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa_kernels.selection import triton_select_long

    poison_buffers(monkeypatch, op, score_chunks, triton_select_long, triton_block_lists)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 64)


@dataclass
class Case:
    """Projections of every token, of which the first query of every block of `block` selects."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    starts: torch.Tensor | None
    block: int
    window: int

    def indexer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q[:, :: self.block], self.k, self.w[:, :: self.block]

    def select(self, **changes: Any) -> block_op.BlockSelection:
        options = {"selection_block": self.block, "local_window": self.window, "document_starts": self.starts}
        ema = torch.tensor(EMA, device=self.q.device)
        return block_op.select_block_lists(*self.indexer(), ema, **{**options, **RULE, **changes})


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
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed + length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    starts = None
    if documents:
        first = torch.rand(batch, length, generator=generator) < 0.04
        first[:, 0] = True
        starts = torch.where(first, torch.arange(length), 0).cummax(1).values.to(device, torch.int32)
    q, k = draw(batch, length, heads, dim), draw(batch, length, dim)
    return Case(q, k, draw(batch, length, heads), starts, block, window)


def check(case: Case, **changes: Any) -> block_op.BlockSelection:
    """Variance to rounding; budget, given the variance, and selection, given the scores, exactly."""
    rule = {**RULE, **changes}
    batch, length = case.k.shape[:2]
    device = case.k.device
    selection = case.select(**changes)
    positions = torch.arange(0, length, case.block, device=device)
    visible = ops.causal_mask(length, query_positions=positions, document_ids=case.starts, device=device)
    visible = visible.expand(batch, len(positions), length)
    scores = op.score_rows(
        *case.indexer(),
        0,
        len(positions),
        document_starts=case.starts,
        selection_block=case.block,
    )
    scores = torch.where(visible, scores, 0)
    _, variance = ops.score_moments(scores, visible)
    torch.testing.assert_close(selection.variance, variance, rtol=1e-5, atol=1e-12)
    ema = torch.tensor(EMA, device=device)
    budget = ops.adaptive_budget(selection.variance, ema, visible.sum(-1), **rule)
    assert torch.equal(selection.budget, budget.int())
    top = ops.select_top_k(scores, visible, budget)
    assert torch.equal(selection.words, packed_mask.pack_mask(top))

    chosen = ops.expand_block_selection(top, case.block, length)
    chosen = chosen | ops.local_window_mask(length, case.window, device=device)
    chosen &= ops.causal_mask(length, document_ids=case.starts, device=device)
    assert torch.equal(mask_from_key_lists(on_cpu(selection.lists)), chosen.cpu())
    check_format(case, selection)
    return selection


def selected_by(case: Case, words: torch.Tensor, queries: range) -> torch.Tensor:
    """S_t of these queries of the first sequence, bool [queries, L]: their block's top-k and their windows, as visible.

    Args:
        words: int32 [B, R, W], the top-k of the blocks
    """
    length, device = case.k.shape[1], case.k.device
    positions = torch.tensor(queries, device=device)
    starts = None if case.starts is None else case.starts[:1]
    top = packed_mask.unpack_mask(words[0, positions // case.block], length)
    window = ops.local_window_mask(length, case.window, query_positions=positions)
    visible = ops.causal_mask(length, query_positions=positions, document_ids=starts, device=device)
    return (top | window) & visible[0]


def on_cpu(lists: KeyLists) -> KeyLists:
    """For loops over the tiles."""
    tensors = {name: value.cpu() for name, value in vars(lists).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(lists, **tensors)


def check_format(case: Case, selection: block_op.BlockSelection) -> None:
    """What the attention relies on beyond the mask: bounds, order, shared keys, a full part where there can be."""
    lists = on_cpu(selection.lists)
    starts = None if case.starts is None else case.starts.cpu()
    assert lists.queries == min(case.block, 32)
    assert lists.length == case.k.shape[1]
    assert int(lists.counts.max()) <= lists.max_count <= lists.length
    per_block = case.block // lists.queries
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
                window_from = max(t0 - case.window + 1, 0 if starts is None else int(starts[b, t0]))
                assert full == int((keys < window_from).sum())
            else:
                assert full == 0


@pytest.mark.parametrize(
    ("block", "window", "length"),
    [(16, 16, 75), (32, 32, 33), (32, 64, 170), (64, 100, 150), (128, 128, 140), (128, 200, 20)],
)
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
def test_lists_are_the_reference_selection(
    device: str, block: int, window: int, length: int, documents: bool
) -> None:
    check(make_case(device, length, block, window, batch=1 + documents, documents=documents))


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu_only)])
def test_many_shapes(device: str, block: int, documents: bool) -> None:
    for window in sorted({block, 2 * block, max(100, block)}):
        for dtype, length in ((torch.float32, 31), (torch.float16, 129), (torch.bfloat16, 1537)):
            check(make_case(device, length, block, window, batch=2, dim=64, dtype=dtype, documents=documents))


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "off", "k_base": 1, "k_min": 1, "k_max": 1},
        {"mode": "off", "k_base": 1000, "k_min": 1, "k_max": 1000},  # all visible keys
        {"mode": "direct", "k_min": 1, "k_max": 4000},
    ],
    ids=["one", "all", "wide"],
)
def test_budgets(device: str, changes: dict[str, Any]) -> None:
    check(make_case(device, 150, 32, 40), **changes)


@pytest.mark.parametrize("register_keys", [32768, 32])
@pytest.mark.parametrize("levels", ["equal", "two"])
def test_ties(device: str, levels: str, register_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through both selection kernels; of equal scores the first keys are taken."""
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", min(register_keys, 128) // 4)
    case = make_case(device, 90, 16, 20)
    case.k[:] = 0 if levels == "equal" else case.k[:, :1]
    if levels == "two":
        case.k[:, ::3] *= -1
    check(case, k_min=15, k_base=15, mode="off")


def test_future_tokens_chunks_and_repetition_change_no_bit(device: str) -> None:
    case = make_case(device, 160, 16, 24, documents=True)
    first, again = case.select(), case.select(row_chunk_bytes=1)
    for name in ("words", "budget", "variance"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    for name in ("keys", "words", "key_starts", "word_starts", "full", "counts"):
        assert torch.equal(getattr(first.lists, name), getattr(again.lists, name)), name
    before = mask_from_key_lists(first.lists)
    cut = 101
    for tensor in (case.q, case.k, case.w):
        tensor[:, cut:] = tensor[:, cut:].flip(1) * 3
    changed = mask_from_key_lists(case.select().lists)
    assert torch.equal(before[:, :cut], changed[:, :cut])
    assert not torch.equal(before, changed)


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu_only)])
def test_long_sequences(device: str, block: int, documents: bool) -> None:
    """Rows of all selection kernels and several chunks, without an L x L mask: the lists against the words."""
    length = 40001
    case = make_case(device, length, block, block, heads=4, dim=64, dtype=torch.bfloat16)
    if documents:
        starts = torch.zeros(length, dtype=torch.int32)
        for start in (7, 5000, 36011):
            starts[start:] = start
        case.starts = starts[None].to(device)
    rule = {"k_base": 1024, "k_min": 256, "k_max": 4096}
    selection = case.select(**rule, row_chunk_bytes=2**26)
    whole = case.select(**rule)
    assert torch.equal(selection.words, whole.words)
    lists = selection.lists
    rows = torch.arange(lists.queries, device=device, dtype=torch.int32)
    for tile in range(0, lists.counts.shape[1], 17):
        count, full = int(lists.counts[0, tile]), int(lists.full[0, tile])
        start, word_start = int(lists.key_starts[0, tile]), int(lists.word_starts[0, tile])
        keys = lists.keys[start : start + count].long()
        hits = lists.words[word_start : word_start + count - full][None] >> rows[:, None] & 1
        mask = torch.zeros(lists.queries, length, dtype=torch.bool, device=device)
        mask[:, keys] = torch.cat([torch.ones_like(keys[:full]).expand(lists.queries, -1), hits], 1).bool()
        first = tile * lists.queries
        wanted = selected_by(case, selection.words, range(first, min(first + lists.queries, length)))
        assert torch.equal(mask[: len(wanted)], wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection_block": 8}, "selection_block is 8; pass one of"),
        ({"local_window": 15}, "local_window is 15, below selection_block 16"),
        ({"selection_block": 32, "local_window": 32}, "q_idx has shape"),
        ({"k_base": 0}, "k_base is 0"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_case("cpu", 40, 16, 16).select(**changes)
