"""Tests queries that start at a position: chunks of queries give the same results as one call.

Each operation runs once over all queries, and once for each chunk with the keys up to its end. Rows of results and of
gradients equal those from one call, and the gradients of keys add up. The tests run in the interpreter (CPU) and,
marked gpu, on a CUDA device.
"""

from typing import Any

import pytest
import torch
from poison import poison_buffers

pytest.importorskip("triton")

from kernel_devices import CUDA, devices
from query_chunks import (
    BLOCK_CHUNKS,
    CHUNKS,
    LENGTH,
    assert_near,
    assert_same,
    attend,
    document_starts,
    draw,
    indexer,
    of_chunk,
    random_mask,
    rows_of,
)

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_block_probs import block_sum_probs_rows
from gsa_kernels.attention.triton_packed_mask import transpose_packed_mask
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.key_lists import triton_block_lists
from gsa_kernels.key_lists.format import key_lists_from_mask, mask_from_key_lists
from gsa_kernels.key_lists.triton_rows import packed_mask_of_rows
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection import op, score_chunks, triton_select_long
from gsa_kernels.selection.block_op import select_block_lists
from gsa_kernels.selection.lists_op import key_lists_from_packed_mask, select_key_lists
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

documents_or_not = pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
RULE = BudgetRule(k_base=12, k_min=4, k_max=20)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, score_chunks, triton_select_long, triton_block_lists)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(score_chunks, "SMALLEST_BLOCK", 32)


@devices
@pytest.mark.parametrize(
    ("kind", "documents", "dtype", "heads"),
    [
        ("words", True, torch.float32, 2),
        ("dense", True, torch.float32, 1),
        ("words", False, torch.bfloat16, 1),
        ("dense", False, torch.bfloat16, 2),
    ],
)
def test_masked_attention(device, kind, documents, dtype, heads):
    torch.manual_seed(0)
    starts = document_starts(device) if documents else None
    q, gate, grad = (draw(device, 2, LENGTH, heads, 32, dtype=dtype) for _ in range(3))
    k, v = (draw(device, 2, LENGTH, 1, 32, dtype=dtype) for _ in range(2))
    mask = random_mask(starts, device)
    words = pack_mask(mask) if kind == "words" else None
    rows, keys = attend(q, k, v, gate, grad, packed_mask=words, geometry=Geometry(starts))
    everything = SampledRows(0, LENGTH)
    probs = head_sum_probs_rows(q, k, rows[1].transpose(1, 2), words, everything, Geometry(starts))
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in keys]
    for first, last in CHUNKS:
        part = {
            "packed_mask": None if words is None else pack_mask(mask[:, first:last, :last]),
            "geometry": Geometry(rows_of(starts, first, last), first),
        }
        own, seen = attend(
            *(x[:, a:last] for x, a in zip((q, k, v, gate, grad), (first, 0, 0, first, first), strict=True)),
            **part,
        )
        for got, want in zip(own, rows, strict=True):
            assert_same(got, want[:, first:last])
        for total, got in zip(sums, seen, strict=True):
            total[:, :last] += got
        lse = own[1].transpose(1, 2)
        got = head_sum_probs_rows(
            q[:, first:last], k[:, :last], lse, rows=SampledRows(2, last - first - 2), **part
        )
        assert_same(got, probs[:, first + 2 : last, :last])
    for total, want in zip(sums, keys, strict=True):
        assert_near(total, want)


@devices
def test_block_sum_probs(device):
    torch.manual_seed(1)
    starts = document_starts(device)
    q, k = draw(device, 2, LENGTH, 2, 32), draw(device, 2, LENGTH, 1, 32)
    lse = draw(device, 2, 2, LENGTH)
    blocks = -(-LENGTH // 16)
    whole = block_sum_probs_rows(q, k, lse, SampledRows(0, blocks), Geometry(starts, 0, 16, 16))
    for first, last in BLOCK_CHUNKS:
        got = block_sum_probs_rows(
            q[:, first:last],
            k[:, :last],
            lse[..., first:last],
            SampledRows(0, -(-(last - first) // 16)),
            Geometry(rows_of(starts, first, last), first, 16, 16),
        )
        assert_same(got, whole[:, first // 16 : -(-last // 16), :last])


@devices
def test_packed_mask_of_a_chunk_far_from_the_start(device):
    """The mask is transposed and converted to lists, by programs of 256 and 4096 keys."""
    torch.manual_seed(7)
    mask = (torch.rand(2, 35, 4300) < 0.01).tril(4300 - 35).to(device)
    words = pack_mask(mask)
    turned = transpose_packed_mask(words, query_start=4300 - 35)
    assert torch.equal(turned, pack_mask(mask.transpose(1, 2)).transpose(1, 2))
    lists = key_lists_from_packed_mask(words, 35, query_start=4300 - 35)
    assert torch.equal(mask_from_key_lists(lists), mask)


@devices
@pytest.mark.parametrize(
    ("documents", "register_keys"), [(False, 32768), (True, 32)], ids=["registers", "groups"]
)
def test_selection(device, documents, register_keys, monkeypatch):
    """The test compares packed masks, lists, and masks of some queries of the lists. One kernel holds a row in
    registers, the other selects by groups."""
    torch.manual_seed(2)
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    length, start = 40, 25  # one program per row is slow to interpret
    starts = document_starts(device)[:, :length] if documents else None
    ema = torch.tensor(0.02, device=device)
    inputs = of_chunk(indexer(device), 0, length)

    def of_queries(first: int, last: int, select: Any) -> Selection:
        geometry = Geometry(rows_of(starts, first, last), first, local_window=5)
        # Chunks have 32 rows.
        return select(Indexer(*of_chunk(inputs, first, last)), RULE, ema, geometry, row_chunk_bytes=2**14)

    whole = of_queries(0, length, select_keys)
    mask = unpack_mask(whole.packed_mask, length)
    packed, listed = (of_queries(start, length, select) for select in (select_keys, select_key_lists))
    wanted = mask[:, start:]
    assert torch.equal(packed.packed_mask, pack_mask(wanted))
    for found in (packed, listed):
        assert torch.equal(found.budget, whole.budget[:, start:])
        assert_same(found.variance, whole.variance[:, start:])
    lists = listed.key_lists
    for each in (lists, key_lists_from_packed_mask(packed.packed_mask, length - start, start)):
        assert torch.equal(mask_from_key_lists(each), wanted)
    rows = torch.tensor([0, 3, length - start - 1], device=device)
    assert torch.equal(packed_mask_of_rows(lists, rows), pack_mask(wanted[:, rows]))


@devices
@documents_or_not
def test_block_selection(device, documents):
    torch.manual_seed(3)
    starts = document_starts(device) if documents else None
    ema = torch.tensor(0.02, device=device)
    inputs = indexer(device, 16)

    def of_queries(first: int, last: int) -> Selection:
        geometry = Geometry(rows_of(starts, first, last), first, 16, local_window=20)
        return select_block_lists(Indexer(*of_chunk(inputs, first, last, 16)), RULE, ema, geometry)

    whole = of_queries(0, LENGTH)
    mask = mask_from_key_lists(whole.key_lists)
    for first, last in BLOCK_CHUNKS:
        rows = slice(first // 16, -(-last // 16))
        shared = of_queries(first, last)
        assert torch.equal(shared.budget, whole.budget[:, rows])
        assert_same(shared.variance, whole.variance[:, rows])
        assert torch.equal(mask_from_key_lists(shared.key_lists), mask[:, first:last, :last])


@devices
def test_prologue_takes_the_rows_of_its_tables(device):
    """`cos` and `sin` hold the positions of the tokens, so any tokens of a sequence can be passed."""
    torch.manual_seed(6)
    qkv, (cos, sin) = draw(device, 20, 2, 4 * 32), draw(device, 2, 20, 16)
    options: dict[str, Any] = {"kv_heads": 1, "value_gate": False, "output_gate": False}
    whole = fused_split_rotate_gate(qkv, None, cos, sin, **options)[:3]
    held = torch.tensor(
        [3, 4, 5, 15, 16], device=device
    )  # There are two stretches, as in zig-zag context parallelism.
    part = fused_split_rotate_gate(qkv[held], None, cos[held], sin[held], **options)[:3]
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[:, held])


@devices
def test_errors(device):
    q, k = draw(device, 1, 8, 2, 32), draw(device, 1, 40, 1, 32)
    q_idx, k_idx, weights = draw(device, 1, 8, 2, 16), draw(device, 1, 40, 16), draw(device, 1, 8, 2)
    ema = torch.tensor(0.02, device=device)
    lists = key_lists_from_mask(torch.ones(1, 8, 40, dtype=torch.bool, device=device).tril(32))
    of_rows = Indexer(q_idx, k_idx, weights)

    def target(rows: SampledRows) -> torch.Tensor:
        raise AssertionError

    def loss(geometry: Geometry) -> object:
        indexer = Indexer(q_idx, k_idx, weights)
        return masked_indexer_loss(indexer, Target(target), Attended(geometry=geometry))

    masked_attention(q, k, k, geometry=Geometry(query_start=32))
    calls = [
        (lambda: masked_attention(q, k, k), "k has shape"),
        (lambda: masked_attention(q, k, k, geometry=Geometry(query_start=31)), "k has shape"),
        (lambda: gathered_attention(q, k[:, 1:], k[:, 1:], lists), "k has shape"),
        (lambda: select_keys(of_rows, RULE, ema), "keys has shape"),
        (lambda: Geometry(None, 24, 16, 16), "query_start is 24 with selection_block 16"),
        (
            lambda: select_block_lists(of_rows, RULE, ema, Geometry(None, 48, 16, 16)),
            "query_start is 48 with 40 keys",
        ),
        (lambda: loss(Geometry()), "indexer.queries has 8 rows; pass 40"),
        (lambda: loss(Geometry(query_start=40)), "query_start is 40 with 40 keys"),
        (lambda: key_lists_from_packed_mask(lists.words.view(1, 8, -1), 8, 40), "packed_mask is"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
