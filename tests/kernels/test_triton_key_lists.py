"""Tests key lists from packed masks and from scores, and packed masks of some queries from key lists."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_devices import ON_GPU
from poison import poison_buffers
from random_lists import lists_of
from selection_cases import FULL_RULE, RULE, Case, make_case

from gsa_kernels import packed_mask
from gsa_kernels.attention.triton_packed_mask import transpose_packed_mask
from gsa_kernels.key_lists import triton_build, triton_rows
from gsa_kernels.key_lists.format import KeyLists, key_lists_from_mask, mask_from_key_lists
from gsa_kernels.key_lists.triton_rows import packed_mask_of_rows
from gsa_kernels.selection import candidates, lists_op, op, score_chunks
from gsa_kernels.types import BudgetRule, Selection


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, lists_op, candidates, triton_build)


def random_mask(device: str, batch: int, length: int, density: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    mask = torch.rand(batch, length, length, generator=generator) < density
    mask[:, :, length // 2 : length // 2 + 5] = True  # in every query's selection
    mask[:, :, length // 3] = False
    return mask.tril().to(device)


def check_equal(lists: KeyLists | None, wanted: KeyLists) -> None:
    """`lists` may have gaps."""
    assert lists is not None
    counts = lists.counts.flatten()
    gaps = lists.starts.flatten() - (counts.cumsum(0) - counts)
    entries = torch.arange(len(wanted.keys), device=counts.device) + gaps.repeat_interleave(counts)
    assert torch.equal(lists.keys[entries], wanted.keys)
    assert torch.equal(lists.words[entries], wanted.words)
    assert torch.equal(lists.counts, wanted.counts)
    assert torch.equal(lists.host_counts.read(), wanted.counts.cpu())
    assert (lists.length, lists.max_count) == (wanted.length, wanted.max_count)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 32), (2, 45), (1, 70)])
def test_lists_of_packed_masks(device: str, batch: int, length: int) -> None:
    mask = random_mask(device, batch, length)
    lists = lists_op.key_lists_from_packed_mask(packed_mask.pack_mask(mask), length)
    check_equal(lists, key_lists_from_mask(mask))
    assert torch.equal(mask_from_key_lists(lists), mask)


@pytest.mark.parametrize(("length", "query_start"), [(1, 0), (45, 1), (64, 31), (70, 33), (33, 4265)])
def test_lists_of_all_causal_keys_fill_their_room(device: str, length: int, query_start: int) -> None:
    """The lists lie next to each other, and their entries are the reference's."""
    mask = torch.ones(2, length, query_start + length, dtype=torch.bool, device=device).tril(query_start)
    lists = lists_op.key_lists_from_packed_mask(packed_mask.pack_mask(mask), length, query_start)
    check_equal(lists, key_lists_from_mask(mask))
    starts, ends = lists.starts.flatten(), (lists.starts + lists.counts).flatten()
    assert starts[0] == 0
    assert torch.equal(starts[1:], ends[:-1])
    assert ends[-1] == lists.keys.numel() == lists.words.numel()


def select_both(
    case: Case, rule: BudgetRule = RULE, window: int = 0, **options: Any
) -> tuple[Selection, Selection]:
    lists = case.select(rule, window, lists_op.select_key_lists, **options)
    return lists, case.select(rule, window, **options)


def check_same(listed: Selection, selection: Selection) -> None:
    assert torch.equal(listed.budget, selection.budget)
    assert torch.equal(listed.variance, selection.variance)
    assert listed.key_lists is not None
    assert selection.packed_mask is not None
    mask = packed_mask.unpack_mask(selection.packed_mask, selection.packed_mask.shape[1])
    assert torch.equal(mask_from_key_lists(listed.key_lists), mask)
    assert listed.key_lists.max_count == int(listed.key_lists.counts.max())


@pytest.mark.parametrize(
    ("length", "documents", "options"),
    [(40, False, {"window": 5}), (35, True, {"row_chunk_bytes": 1})],
    ids=["one chunk", "many chunks"],
)
def test_lists_hold_the_selection(device: str, length: int, documents: bool, options: dict[str, Any]) -> None:
    case = make_case(device, length, batch=1 + documents, documents=documents)
    check_same(*select_both(case, **options))


@pytest.mark.parametrize("length", [1, 20, 77, 96])
def test_packed_mask_of_some_queries(device, length, monkeypatch):
    """Lists have gaps and random bits beyond L, and take several steps."""
    monkeypatch.setattr(triton_rows, "_ENTRIES", 32)
    mask = random_mask(device, 2, length, 0.4)
    lists = lists_of(mask)
    rows = torch.arange(length)[:: 1 + length // 8].to(device)
    words = packed_mask_of_rows(lists, rows)
    assert torch.equal(words, packed_mask.pack_mask(mask[:, rows]))
    assert packed_mask_of_rows(lists, rows[:0]).shape == (2, 0, words.shape[2])


@pytest.mark.parametrize("candidates_from", [pytest.param(value, marks=ON_GPU) for value in (None, 8192)])
def test_lists_at_128k(candidates_from: int | None) -> None:
    case = make_case("cuda", 131072, heads=4, dim=64, dtype=torch.bfloat16)
    selected, selection = select_both(case, FULL_RULE, candidates_from=candidates_from)
    lists, words = selected.key_lists, selection.packed_mask
    assert lists is not None
    assert words is not None
    for tile in (0, 1, 255, 256, 2000, 4095):
        start, count = int(lists.starts[0, tile]), int(lists.counts[0, tile])
        mask = packed_mask.unpack_mask(words[:, tile * 32 : tile * 32 + 32], 131072)[0]
        union = mask.any(0)
        assert torch.equal(lists.keys[start : start + count].long(), union.nonzero()[:, 0])
        bits = (lists.words[start : start + count, None] >> torch.arange(32, device="cuda")) & 1
        assert torch.equal(bits.bool().T, mask[:, union])


def test_packed_mask_of_a_chunk_far_from_the_start(device: str) -> None:
    """The mask is transposed and converted to lists, by programs of 256 and 4096 keys."""
    torch.manual_seed(7)
    mask = (torch.rand(2, 35, 4300) < 0.01).tril(4300 - 35).to(device)
    words = packed_mask.pack_mask(mask)
    turned = transpose_packed_mask(words, query_start=4300 - 35)
    assert torch.equal(turned, packed_mask.pack_mask(mask.transpose(1, 2)).transpose(1, 2))
    lists = lists_op.key_lists_from_packed_mask(words, 35, query_start=4300 - 35)
    assert torch.equal(mask_from_key_lists(lists), mask)
    with pytest.raises(ValueError, match="packed_mask is"):
        lists_op.key_lists_from_packed_mask(words, 35, query_start=4300)


def test_a_key_named_twice_is_refused() -> None:
    lists = key_lists_from_mask(torch.ones(1, 32, 32, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="names a key twice"):
        mask_from_key_lists(replace(lists, keys=torch.zeros_like(lists.keys)))
