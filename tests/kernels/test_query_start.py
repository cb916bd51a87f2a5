"""Queries that start at a position: a sequence in runs of queries gives what it gives in one call.

Each operation runs once over all queries and once for each run, with the keys up to the run's end. Rows of results
and of gradients are those of the whole, and the gradients of keys add up to it. In the interpreter (CPU) and, marked
gpu, on a CUDA device.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined, so before the imports below

from random_lists import make_mask  # noqa: E402

from gsa_kernels.attention.gathered import gathered_attention  # noqa: E402
from gsa_kernels.attention.op import masked_attention  # noqa: E402
from gsa_kernels.attention.triton_block_probs import block_sum_probs_rows  # noqa: E402
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists  # noqa: E402
from gsa_kernels.attention.triton_probs import head_sum_probs_rows  # noqa: E402
from gsa_kernels.attention.triton_words import transpose_words  # noqa: E402
from gsa_kernels.kl.gathered import gathered_indexer_kl_loss  # noqa: E402
from gsa_kernels.kl.op import indexer_kl_loss  # noqa: E402
from gsa_kernels.kl.triton_gathered_launch import GatheredBlocks  # noqa: E402
from gsa_kernels.kl.triton_launch import Blocks  # noqa: E402
from gsa_kernels.lists import triton_block_lists  # noqa: E402
from gsa_kernels.lists.key_lists import key_lists_from_mask, mask_from_key_lists  # noqa: E402
from gsa_kernels.prologue.op import fused_split_rotate_gate  # noqa: E402
from gsa_kernels.sampling import RowSample  # noqa: E402
from gsa_kernels.selection import op, triton_select_long  # noqa: E402
from gsa_kernels.selection.block_op import expand_block_words, select_block_lists  # noqa: E402
from gsa_kernels.selection.lists_op import key_lists_from_words, select_key_lists  # noqa: E402
from gsa_kernels.selection.op import mask_from_words, select_keys, words_from_mask  # noqa: E402
from gsa_kernels.statistics import lists as list_statistics  # noqa: E402
from gsa_kernels.statistics import reference as statistics  # noqa: E402

CPU = pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the kernels are compiled for CUDA here"))
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")])
devices = pytest.mark.parametrize("device", [CPU, GPU])
documents_or_not = pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])

LENGTH = 70
RUNS = ((0, 41), (41, LENGTH))
"""Not cut at a tile of queries or keys, which are 16 to 128."""
BLOCK_RUNS = ((0, 16), (16, LENGTH))
"""Of blocks of 16."""
RULE: dict[str, Any] = {"k_base": 12, "k_min": 4, "k_max": 20, "mode": "inverse"}


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the selection's kernels do not write is NaN, or a large integer."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30 + 7)

    fake = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    fake.empty = poisoned
    for module in (op, triton_select_long, triton_block_lists):
        monkeypatch.setattr(module, "torch", fake)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(op, "_SMALLEST_BLOCK", 32)


def draw(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def document_starts(device: str) -> torch.Tensor:
    """int32 [2, L]; documents begin inside of runs, at their first query, and just behind it."""
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    for row, cuts in enumerate(((20, 41, 60), (36, 42))):
        for cut in cuts:
            starts[row, cut:] = cut
    return starts.to(device)


def visible(starts: torch.Tensor | None, device: str) -> torch.Tensor:
    position = torch.arange(LENGTH, device=device)
    mask = (position[None, :] <= position[:, None]).expand(2, LENGTH, LENGTH)
    return mask if starts is None else mask & (position >= starts[..., None])


def random_mask(starts: torch.Tensor | None, device: str) -> torch.Tensor:
    """A random part of what each query sees, and the query itself."""
    mask = visible(starts, device) & (torch.rand(2, LENGTH, LENGTH) < 0.5).to(device)
    return mask | torch.eye(LENGTH, dtype=torch.bool, device=device)


def rows_of(tensor: torch.Tensor | None, first: int, last: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, first:last]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """To the bit, where sums run in the same order; compiled, products may be fused with sums in another way."""
    assert got.dtype == want.dtype
    if CUDA and got.is_floating_point():
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)
    else:
        assert torch.equal(got, want)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Where sums run in another order."""
    tolerance = {torch.float32: 2e-5, torch.float16: 6e-3}[want.dtype]
    torch.testing.assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance)


def attend(q, k, v, gate, grad, **options):  # type: ignore[no-untyped-def]
    """Output, lse and gradients of q, gate, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
    attention = gathered_attention if "lists" in options else masked_attention
    out, lse = attention(*leaves[:3], output_gate_logits=leaves[3], **options)
    grad_q, grad_k, grad_v, grad_gate = torch.autograd.grad(out, leaves, grad)
    return (out.detach(), lse.transpose(1, 2), grad_q, grad_gate), (grad_k, grad_v)


@devices
@pytest.mark.parametrize(
    ("kind", "documents", "dtype", "heads"),
    [
        ("words", True, torch.float32, 2),
        ("dense", True, torch.float32, 1),
        ("words", False, torch.float16, 1),
        ("dense", False, torch.float16, 2),
    ],
)
def test_masked_attention(device, kind, documents, dtype, heads):
    torch.manual_seed(0)
    starts = document_starts(device) if documents else None
    q, gate, grad = (draw(device, 2, LENGTH, heads, 32, dtype=dtype) for _ in range(3))
    k, v = (draw(device, 2, LENGTH, 1, 32, dtype=dtype) for _ in range(2))
    mask = random_mask(starts, device)
    words = words_from_mask(mask) if kind == "words" else None
    rows, keys = attend(q, k, v, gate, grad, words=words, document_starts=starts)
    probs = head_sum_probs_rows(
        q, k, rows[1].transpose(1, 2), words, RowSample(0, LENGTH), document_starts=starts
    )
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in keys]
    for first, last in RUNS:
        part = {
            "words": None if words is None else words_from_mask(mask[:, first:last, :last]),
            "document_starts": rows_of(starts, first, last),
            "query_start": first,
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
            q[:, first:last], k[:, :last], lse, rows=RowSample(2, last - first - 2), **part
        )
        assert_same(got, probs[:, first + 2 : last, :last])
    for total, want in zip(sums, keys, strict=True):
        assert_near(total, want)


@devices
@pytest.mark.parametrize("kind", ["words", "dense"])
def test_block_sum_probs(device, kind):
    torch.manual_seed(1)
    starts = document_starts(device)
    q, k = draw(device, 2, LENGTH, 2, 32), draw(device, 2, LENGTH, 1, 32)
    mask = random_mask(starts, device)
    words = words_from_mask(mask) if kind == "words" else None
    lse = draw(device, 2, 2, LENGTH)
    blocks = -(-LENGTH // 16)
    whole = block_sum_probs_rows(
        q, k, lse, words, RowSample(0, blocks), selection_block=16, document_starts=starts
    )
    for first, last in BLOCK_RUNS:
        got = block_sum_probs_rows(
            q[:, first:last],
            k[:, :last],
            lse[..., first:last],
            None if words is None else words_from_mask(mask[:, first:last, :last]),
            RowSample(0, -(-(last - first) // 16)),
            selection_block=16,
            document_starts=rows_of(starts, first, last),
            query_start=first,
        )
        assert_same(got, whole[:, first // 16 : -(-last // 16), :last])


@devices
def test_bits_of_a_run_far_from_the_start(device):
    """Turned round, and as lists: their programs have 256 and 4096 keys."""
    torch.manual_seed(7)
    mask = (torch.rand(2, 35, 4300) < 0.01).tril(4300 - 35).to(device)
    words = words_from_mask(mask)
    turned = transpose_words(words, query_start=4300 - 35)
    assert torch.equal(turned, words_from_mask(mask.transpose(1, 2)).transpose(1, 2))
    lists = key_lists_from_words(words, 35, query_start=4300 - 35)
    assert torch.equal(mask_from_key_lists(lists), mask)


def indexer(device: str, block: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (of the blocks' first tokens), keys and weight logits."""
    rows = -(-LENGTH // block)
    return draw(device, 2, rows, 2, 16), draw(device, 2, LENGTH, 16), draw(device, 2, rows, 2)


def of_run(
    inputs: tuple[torch.Tensor, ...], first: int, last: int, block: int = 1
) -> tuple[torch.Tensor, ...]:
    q_idx, k_idx, weights = inputs
    rows = slice(first // block, -(-last // block))
    return q_idx[:, rows], k_idx[:, :last], weights[:, rows]


@devices
@pytest.mark.parametrize(
    ("documents", "register_keys"), [(False, 32768), (True, 32)], ids=["registers", "groups"]
)
def test_selection(device, documents, register_keys, monkeypatch):
    """Bits, lists, and the lists' statistics. One kernel has a row in registers, one goes by groups of keys."""
    torch.manual_seed(2)
    monkeypatch.setattr(op, "REGISTER_KEYS", register_keys)
    length, start = 44, 9  # a program per row is slow to interpret
    starts = document_starts(device)[:, :length] if documents else None
    ema = torch.tensor(0.02, device=device)
    inputs = of_run(indexer(device), 0, length)
    # Chunks of 32 rows.
    options: dict[str, Any] = {**RULE, "local_window": 5, "row_chunk_bytes": 2**14}
    whole = select_keys(*inputs, ema, document_starts=starts, **options)
    mask = mask_from_words(whole.words, length)
    begin = select_keys(*of_run(inputs, 0, start), ema, document_starts=rows_of(starts, 0, start), **options)
    assert torch.equal(begin.words, words_from_mask(mask[:, :start, :start]))

    rest = {"document_starts": rows_of(starts, start, length), "query_start": start, **options}
    bits = select_keys(*of_run(inputs, start, length), ema, **rest)
    listed = select_key_lists(*of_run(inputs, start, length), ema, **rest)
    wanted = mask[:, start:]
    assert torch.equal(bits.words, words_from_mask(wanted))
    for found in (bits, listed):
        assert torch.equal(found.budget, whole.budget[:, start:])
        assert_same(found.variance, whole.variance[:, start:])
    for lists in (listed.lists, key_lists_from_words(bits.words, length - start, start)):
        assert torch.equal(mask_from_key_lists(lists), wanted)
    lists = listed.lists
    assert torch.equal(list_statistics.selected_per_row(lists), wanted.sum(-1))
    assert torch.equal(list_statistics.selects_key_zero(lists), wanted[..., 0])
    pairs = [
        (list_statistics.adjacent_overlap_of_lists(lists), statistics.adjacent_overlap(wanted)),
        (list_statistics.union_ratio_of_lists(lists), statistics.union_ratio(wanted)),
    ]
    for got, want in pairs:
        torch.testing.assert_close(got, want)


@devices
@documents_or_not
def test_block_selection(device, documents):
    torch.manual_seed(3)
    starts = document_starts(device) if documents else None
    ema = torch.tensor(0.02, device=device)
    inputs = indexer(device, 16)
    options: dict[str, Any] = {"selection_block": 16, "local_window": 20}
    whole = select_block_lists(*inputs, ema, document_starts=starts, **RULE, **options)
    mask = mask_from_key_lists(whole.lists)
    for first, last in BLOCK_RUNS:
        rows = slice(first // 16, -(-last // 16))
        part = {"document_starts": rows_of(starts, first, last), "query_start": first, **options}
        shared = select_block_lists(*of_run(inputs, first, last, 16), ema, **RULE, **part)
        assert torch.equal(shared.budget, whole.budget[:, rows])
        assert_same(shared.variance, whole.variance[:, rows])
        assert torch.equal(
            shared.words, words_from_mask(mask_from_words(whole.words, LENGTH)[:, rows, :last])
        )
        assert torch.equal(mask_from_key_lists(shared.lists), mask[:, first:last, :last])
        words = expand_block_words(shared.words, length=last - first, **part)
        assert torch.equal(words, words_from_mask(mask[:, first:last, :last]))


NAMES = ("score_bias", "weight_bias", "inverse_temperature")


def kl_inputs(device: str, block: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    others = dict(zip(NAMES, (draw(device, 2), draw(device, 2), torch.tensor(1.7)), strict=True))
    return indexer(device, block), {name: x.to(device) for name, x in others.items()}


def kl_gradients(loss, inputs, others, *arguments, **options):  # type: ignore[no-untyped-def]
    """KL of the rows and the gradients of q_idx and weight_logits, of k_idx, and of the rest."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *others.values())]
    total, rows = loss(
        *leaves[:3], *arguments, **dict(zip(others, leaves[3:], strict=True)), return_rows=True, **options
    )
    grad_q, grad_k, grad_w, *rest = torch.autograd.grad(total, leaves)
    return (rows, grad_q, grad_w), grad_k, [total.detach(), *rest]


def check_kl(whole, parts, runs, block, same):  # type: ignore[no-untyped-def]
    rows, grad_k, totals = whole
    sum_k, sums = torch.zeros_like(grad_k), [torch.zeros_like(x) for x in totals]
    for (first, last), (own, seen, added) in zip(runs, parts, strict=True):
        for got, want in zip(own, rows, strict=True):
            same(got, want[:, first // block : -(-last // block)])
        sum_k[:, :last] += seen
        sums = [total + x for total, x in zip(sums, added, strict=True)]
    for got, want in zip([sum_k, *sums], [grad_k, *totals], strict=True):
        assert_near(got, want)


@devices
@pytest.mark.parametrize(
    ("support", "block", "documents", "stacked"),
    [
        ("dense", 1, True, False),
        ("words", 1, False, False),
        ("words", 1, True, True),
        ("dense", 1, False, True),
        ("dense", 16, True, False),
    ],
)
def test_kl_over_rows(device, support, block, documents, stacked):
    torch.manual_seed(4)
    starts = document_starts(device) if documents else None
    inputs, others = kl_inputs(device, block)
    mask = random_mask(starts, device)[:, ::block]
    probs = torch.rand(2, len(mask[0]), LENGTH).to(device)
    options: dict[str, Any] = {
        "selection_block": block,
        "row_chunk_bytes": 4 * 2 * LENGTH * 32,
        "blocks": Blocks(32, 64 if stacked else 32, 8, 32, 8, segment=64, stacked=stacked),
    }

    def run(first: int, last: int) -> Any:
        part = slice(first // block, -(-last // block))

        def target(start: int, rows: int) -> torch.Tensor:
            return probs[:, part][:, start : start + rows, :last]

        words = words_from_mask(mask[:, part, :last]) if support == "words" else None
        return kl_gradients(
            indexer_kl_loss,
            of_run(inputs, first, last, block),
            others,
            target,
            words=words,
            document_starts=rows_of(starts, first, last),
            query_start=first,
            **options,
        )

    runs = RUNS if block == 1 else BLOCK_RUNS
    check_kl(run(0, LENGTH), [run(*ends) for ends in runs], runs, block, assert_near)


@devices
@pytest.mark.parametrize("block", [1, 16])
def test_over_lists(device, block):
    """Attention, its probabilities and the loss; tiles of the runs begin elsewhere than those of the whole."""
    torch.manual_seed(5)
    mask = make_mask(LENGTH, 2, block, max(1, block), True, 5).to(device)
    q, gate, grad = (draw(device, 2, LENGTH, 2, 32) for _ in range(3))
    k, v = (draw(device, 2, LENGTH, 1, 32) for _ in range(2))
    inputs, others = kl_inputs(device, block)

    def run(first: int, last: int, deterministic: bool) -> Any:
        lists = key_lists_from_mask(mask[:, first:last, :last], 16)
        assert lists.query_start == first
        parts = (
            x[:, a:last] for x, a in zip((q, k, v, gate, grad), (first, 0, 0, first, first), strict=True)
        )
        rows, keys = attend(*parts, lists=lists, deterministic=deterministic, scratch_bytes=2**15)

        def target(tiles: torch.Tensor) -> torch.Tensor:
            lse = rows[1].transpose(1, 2)
            return head_sum_probs_lists(
                q[:, first:last], k[:, :last], lse, lists, tiles, selection_block=block
            )

        loss = kl_gradients(
            gathered_indexer_kl_loss,
            of_run(inputs, first, last, block),
            others,
            target,
            lists,
            selection_block=block,
            blocks=GatheredBlocks(16, 8, 16, 8, segment=32, stats_stages=1),
        )
        return rows, keys, loss

    runs = RUNS if block == 1 else BLOCK_RUNS
    rows, keys, loss = run(0, LENGTH, True)
    results = [run(*ends, index > 0) for index, ends in enumerate(runs)]
    sums = [torch.zeros_like(x) for x in keys]
    for (first, last), (own, seen, _) in zip(runs, results, strict=True):
        for got, want in zip(own, rows, strict=True):
            assert_near(got, want[:, first:last])
        for total, got in zip(sums, seen, strict=True):
            total[:, :last] += got
    for total, want in zip(sums, keys, strict=True):
        assert_near(total, want)
    check_kl(loss, [result[2] for result in results], runs, block, assert_near)


@devices
def test_prologue_takes_the_rows_of_its_tables(device):
    """The positions of the tokens are those of `cos` and `sin`: any tokens of a sequence can be given."""
    torch.manual_seed(6)
    qkv, (cos, sin) = draw(device, 20, 2, 4 * 32), draw(device, 2, 20, 16)
    options: dict[str, Any] = {"kv_heads": 1, "value_gate": False, "output_gate": False}
    whole = fused_split_rotate_gate(qkv, None, None, cos, sin, **options)[:3]
    held = torch.tensor([3, 4, 5, 15, 16], device=device)  # two runs, as under zig-zag context parallelism
    part = fused_split_rotate_gate(qkv[held], None, None, cos[held], sin[held], **options)[:3]
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[:, held])


@devices
def test_errors(device):
    q, k = draw(device, 1, 8, 2, 32), draw(device, 1, 40, 1, 32)
    q_idx, k_idx, weights = draw(device, 1, 8, 2, 16), draw(device, 1, 40, 16), draw(device, 1, 8, 2)
    ema = torch.tensor(0.02, device=device)
    lists = key_lists_from_mask(torch.ones(1, 8, 40, dtype=torch.bool, device=device).tril(32))
    blocks = {**RULE, "selection_block": 16, "local_window": 16}

    def target(start: int, rows: int) -> torch.Tensor:
        raise AssertionError

    masked_attention(q, k, k, query_start=32)
    calls = [
        (lambda: masked_attention(q, k, k), "k has shape"),
        (lambda: masked_attention(q, k, k, query_start=31), "k has shape"),
        (lambda: masked_attention(q, k, k, query_start=-1), "query_start is -1"),
        (lambda: gathered_attention(q, k[:, 1:], k[:, 1:], lists), "k has shape"),
        (lambda: select_keys(q_idx, k_idx, weights, ema, **RULE), "k_idx has shape"),
        (
            lambda: select_block_lists(q_idx, k_idx, weights, ema, query_start=24, **blocks),
            "query_start is 24 with selection_block 16",
        ),
        (
            lambda: select_block_lists(q_idx, k_idx, weights, ema, query_start=48, **blocks),
            "query_start is 48 with 40 keys",
        ),
        (lambda: indexer_kl_loss(q_idx, k_idx, weights, target), "k_idx has shape"),
        (
            lambda: indexer_kl_loss(q_idx, k_idx, weights, target, query_start=8, selection_block=16),
            "query_start is 8 with selection_block 16",
        ),
        (
            lambda: block_sum_probs_rows(
                q, k, draw(device, 1, 2, 8), None, RowSample(0, 1), selection_block=64, query_start=32
            ),
            "query_start is 32 with selection_block 64",
        ),
        (lambda: key_lists_from_words(lists.words.view(1, 8, -1), 8, 40), "words is"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
