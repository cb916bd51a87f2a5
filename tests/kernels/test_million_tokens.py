"""Tests the kernels for long contexts at 2^20 tokens. At this length q has 2^32 elements, so int32 offsets would
overflow. Only the first and the last programs of each launch run. For the rows that these programs read, torch gives
the expected results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")


from gsa_kernels.attention.inputs import AttentionInputs, GradientInputs
from gsa_kernels.attention.triton_backward import backward_rows
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.attention.triton_gathered_backward import _launch
from gsa_kernels.attention.triton_gathered_forward import gathered_forward
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.devices import interpreted
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.indexer.score_inputs import score_inputs
from gsa_kernels.indexer.triton_scores import write_scores
from gsa_kernels.key_lists.format import HostCounts, KeyLists
from gsa_kernels.key_lists.triton_reduce_keys import KeyHits, TileRows, add_partials_by_key, find_key_hits
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import list_columns
from gsa_kernels.reference import indexer_scores
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.candidates import sample_keys, select_by_candidates
from gsa_kernels.selection.criteria import Outputs
from gsa_kernels.selection.op import Selector
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample
from helpers.corner_programs import run_corners

pytestmark = pytest.mark.skipif(not interpreted(), reason="of the interpreter")

LENGTH, HEADS, KV_HEADS, SIZE, QUERIES = 2**20, 32, 8, 128, 32
TILES = LENGTH // QUERIES
GROUP = HEADS // KV_HEADS
KEYS = torch.tensor([0, 5, 70000, LENGTH // 2 + 3, *range(LENGTH - 40, LENGTH - 31)])
"""Keys of the last tile of queries, whose queries attend to all of them."""
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _corners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results of programs that do not run be 0."""
    run_corners(monkeypatch)
    monkeypatch.setattr(torch, "empty", _empty)
    monkeypatch.setattr(torch, "empty_like", lambda like: reserved(*like.shape, dtype=like.dtype))


def _empty(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
    return reserved(*(shape if isinstance(shape[0], int) else shape[0]), dtype=dtype)


def reserved(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return zeros that take no memory until something is written: calloc, unlike torch.zeros, which writes them."""
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def of_tokens(heads: int, rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Return [1, LENGTH, heads, SIZE], random for these tokens."""
    whole = reserved(1, LENGTH, heads, SIZE)
    generator = torch.Generator().manual_seed(seed)
    whole[0, rows] = torch.randn(len(rows), heads, SIZE, generator=generator).to(BF16)
    return whole


LAST = torch.arange(LENGTH - QUERIES, LENGTH)


def last_list() -> KeyLists:
    """Return key lists of the last tile alone. Its entries follow 2^31 other entries, which take no
    memory."""
    far = 2**31 + 7
    keys, words = (reserved(far + len(KEYS), dtype=torch.int32) for _ in range(2))
    keys[far:], words[far:] = KEYS, -1
    counts, starts = reserved(1, TILES, dtype=torch.int32), reserved(1, TILES, dtype=torch.int64)
    counts[0, -1], starts[0, -1] = len(KEYS), far
    return KeyLists(keys, words, starts, counts, LENGTH, HostCounts(counts.cpu()))


@pytest.fixture(scope="module", params=["tokens first", "heads first"])
def attended(request: pytest.FixtureRequest) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, and the gradient of the output, in either order in memory."""
    given = (
        of_tokens(HEADS, LAST, 0),
        of_tokens(KV_HEADS, KEYS, 1),
        of_tokens(KV_HEADS, KEYS, 2),
        of_tokens(HEADS, LAST, 3),
    )
    if request.param == "tokens first":
        return given
    return tuple(map(with_heads_first, given, (LAST, KEYS, KEYS, LAST)))


def with_heads_first(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy the values at the tokens `rows` to a tensor with the memory layout [B, H, L, D]."""
    other = reserved(1, whole.shape[2], LENGTH, SIZE).transpose(1, 2)
    for head in range(whole.shape[2]):
        other[0, rows, head] = whole[0, rows, head]
    return other


def few(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return [heads, rows, SIZE] of the first key-value head and its query heads, in fp64."""
    heads = GROUP if whole.shape[2] == HEADS else 1
    return whole[0, rows, :heads].double().transpose(0, 1)


def test_attention_over_lists(attended: tuple[torch.Tensor, ...]) -> None:
    q, k, v, grad = attended
    out, lse = gathered_forward(AttentionInputs(q, k, v, None), last_list())
    leaves = [few(x, rows).requires_grad_() for x, rows in ((q, LAST), (k, KEYS), (v, KEYS))]
    queries, keys, values = leaves
    logits = queries @ keys.mT * SIZE**-0.5
    wanted = logits.softmax(-1) @ values
    torch.testing.assert_close(few(out, LAST), wanted, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse[0, :GROUP, LAST].double(), logits.logsumexp(-1), atol=1e-3, rtol=0)

    # One tile of all key-value heads: the first and the last program run.
    upstream = few(grad, LAST)
    of_rows = reserved(1, HEADS, LENGTH, dtype=torch.float32)
    delta, lse2 = of_rows, reserved(1, HEADS, LENGTH, dtype=torch.float32)
    delta[0, :GROUP, LAST] = (upstream * wanted).sum(-1).float()
    lse2[0, :GROUP, LAST] = logits.logsumexp(-1).float() / torch.tensor(2.0).log()
    zero = torch.zeros(1, dtype=torch.int64)
    rows = TileRows(TILES - 1, TILES, zero, zero.int(), len(KEYS))
    grad_q, partials = torch.empty_like(q), torch.zeros(KV_HEADS, len(KEYS), 2 * SIZE, dtype=BF16)
    lists = last_list()
    _launch(GradientInputs(grad, q, k, v, delta, lse2), lists, grad_q, GROUP, rows, 0, partials)
    grads = torch.autograd.grad(wanted, leaves, upstream)
    for got, want in zip(
        (few(grad_q, LAST), partials[0, :, SIZE:], partials[0, :, :SIZE]),
        (grads[0], grads[1][0], grads[2][0]),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), want, atol=5e-2, rtol=2e-2)

    # These are the log-sum-exps of all heads, which the forward pass's other programs would have computed.
    grouped = q[0, LAST].double().unflatten(1, (KV_HEADS, GROUP))
    logits = torch.einsum("tghd,sgd->ghts", grouped, k[0, KEYS].double()) * SIZE**-0.5
    lse[0, :, LAST] = logits.logsumexp(-1).float().flatten(0, 1)
    rows = SampledRows(LENGTH - QUERIES, QUERIES, stretch=QUERIES)
    probs = head_sum_probs_lists(q, k, lse, lists, rows, len(KEYS))
    torch.testing.assert_close(probs[0].double(), logits.softmax(-1).sum((0, 1)), atol=1e-4, rtol=1e-4)


def test_dense_attention_with_heads_first_in_memory() -> None:
    """The gate of the only key-value head has 2^32 elements; the last tile is a separate document."""
    tile = torch.arange(LENGTH - 64, LENGTH)
    q, gate = (with_heads_first(of_tokens(HEADS, tile, seed), tile) for seed in (0, 2))
    k, v = of_tokens(1, tile, 1), of_tokens(1, tile, 3)
    starts = reserved(1, LENGTH, dtype=torch.int32)
    starts[0, tile] = LENGTH - 64
    out, _ = attention_forward(AttentionInputs(q, k, v, gate.unflatten(2, (1, HEADS))), None, starts)
    queries, keys, values, opening = (x[0, tile, -1].double() for x in (q, k, v, gate))
    logits = (queries @ keys.mT * SIZE**-0.5).masked_fill(torch.ones(64, 64).triu(1) > 0, -torch.inf)
    wanted = logits.softmax(-1) @ values * opening.sigmoid()
    torch.testing.assert_close(out[0, tile, -1].double(), wanted, atol=2e-2, rtol=0)


def test_rows_of_the_backward_pass() -> None:
    grad, out = of_tokens(HEADS, LAST, 0), of_tokens(HEADS, LAST, 1)
    gate = of_tokens(HEADS, LAST, 2).unflatten(2, (KV_HEADS, GROUP))
    lse = reserved(1, HEADS, LENGTH, dtype=torch.float32)
    lse[0, -1, -1] = 1.0
    attended, by_gate, delta, lse2 = backward_rows(grad, out, lse, gate)
    u, o, opening = (x[0, -8:].flatten(1, -2)[:, -1].double() for x in (grad, out, gate))
    opening = opening.sigmoid()
    torch.testing.assert_close(attended[0, -8:, -1].double(), u * opening, atol=1e-2, rtol=1e-2)
    assert by_gate is not None
    wanted = u * o * (1 - opening)
    torch.testing.assert_close(by_gate[0, -8:, -1, -1].double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(delta[0, -1, -8:].double(), (u * o).sum(-1), atol=1e-3, rtol=1e-4)
    assert lse2[0, -1, -1] > 1.4


def test_rows_of_many_short_sequences() -> None:
    """The problem has 65544 sequences and heads, more than a grid's second axis allows."""
    shape = (8193, 3, 8, 32)
    grad, out = torch.ones(shape), torch.arange(8.0).repeat_interleave(32).view(8, 32).expand(shape)
    _, _, delta, lse2 = backward_rows(grad, out, torch.ones(8193, 8, 3), None)
    assert delta[0, 0].tolist() == [0.0] * 3
    assert delta[-1, -1].tolist() == [7.0 * 32] * 3
    assert lse2[-1, -1, -1] > 1.4


def test_sums_by_key() -> None:
    """The test compares sums of the first and the last key."""
    lists = last_list()
    zero = torch.zeros(1, dtype=torch.int64)
    rows = TileRows(TILES - 1, TILES, zero, zero.int(), len(KEYS))
    hits = find_key_hits(lists, rows)
    # Programs count many keys each; the first and the last program ran.
    assert hits.rows[0] == 0
    assert hits.starts[1] == 1
    partials = torch.randn(KV_HEADS, 3, 2 * SIZE).to(BF16)
    starts = torch.ones(LENGTH + 1, dtype=torch.int32)
    starts[0], starts[-1] = 0, 3
    sums = reserved(1, LENGTH, KV_HEADS, 2 * SIZE, dtype=torch.float32)
    add_partials_by_key(partials, KeyHits(starts, torch.arange(3, dtype=torch.int32), 3), sums)
    torch.testing.assert_close(sums[0, 0, -1], partials[-1, 0].float())
    torch.testing.assert_close(sums[0, -1, -1], partials[-1, 1:].float().sum(0))
    torch.testing.assert_close(sums[0, -1, 0], partials[0, 1:].float().sum(0))


def make_indexer(rows: int) -> Indexer:
    """Build an indexer that is random for the last queries and for all keys."""
    generator = torch.Generator().manual_seed(rows)
    queries, weights = reserved(1, rows, 2, 64), reserved(1, rows, 2)
    queries[0, -64:] = torch.randn(64, 2, 64, generator=generator).to(BF16)
    weights[0, -64:] = torch.randn(64, 2, generator=generator).to(BF16)
    keys = torch.randn(1, 4096, 64, generator=generator).to(BF16).repeat(1, LENGTH // 4096, 1)
    return Indexer(queries, keys, weights)


def test_scores() -> None:
    inputs = score_inputs(make_indexer(LENGTH), Geometry())
    scores = torch.zeros(1, 64, LENGTH)
    write_scores(inputs, LENGTH - 64, LENGTH, scores)
    x = inputs.indexer
    rows = slice(LENGTH - 32, None)  # of the last program
    wanted = indexer_scores(x.queries[:, rows], x.keys[:, -64:], x.head_weight_logits[:, rows])
    torch.testing.assert_close(scores[:, -32:, -64:], wanted.float(), atol=2e-2, rtol=0)


def test_candidates() -> None:
    """No offset and no grid is too large. Few programs run, so the rows are not complete."""
    rule = BudgetRule(2048, 256, 4096, "off")
    selector = Selector(make_indexer(LENGTH), rule, torch.zeros(()), Geometry(), 2**25, 8192)
    rows = selector.chunks[-1]
    assert selector.by_candidates(rows)
    assert rows.stop == LENGTH
    packed = reserved(1, len(rows), TILES, dtype=torch.int32)
    outputs = Outputs(
        packed, reserved(1, LENGTH, dtype=torch.int32), reserved(1, LENGTH, dtype=torch.float32), rows.start
    )
    select_by_candidates(selector.criteria, sample_keys(selector.inputs), rows, outputs)


def test_the_loss_of_the_last_tile() -> None:
    indexer, lists = make_indexer(LENGTH), last_list()
    target = torch.rand(1, QUERIES, list_columns(lists))
    # The share is one tile; other ranks take the other tiles.
    sample = RowSample(share=(TILES - 1, TILES))
    leaves = [x.requires_grad_() for x in (indexer.queries, indexer.keys, indexer.head_weight_logits)]
    loss, kl = triton_indexer_loss(indexer, Target(lambda rows: target), Attended(key_lists=lists), sample)
    small = [leaves[0][:, -QUERIES:].double(), leaves[1][:, KEYS].double(), leaves[2][:, -QUERIES:].double()]
    scores = indexer_scores(*small)
    p = target[0, :, : len(KEYS)].double()
    p = p / p.sum(-1, keepdim=True)
    wanted = (p * (p.log() - scores[0].log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl[0, -QUERIES:].double(), wanted, atol=1e-3, rtol=1e-2)
    assert kl[0, :-QUERIES].isnan().all()
    torch.testing.assert_close(loss.double(), wanted.sum(), atol=1e-2, rtol=1e-2)


def test_what_is_around_attention() -> None:
    length, width = LENGTH // 4, 64
    x = torch.randn(4, 2 * width).to(BF16).repeat(length, 1)
    out = fused_swiglu(x)
    gate, value = x[-1].double().chunk(2)
    torch.testing.assert_close(out[-1].double(), torch.nn.functional.silu(gate) * value, atol=1e-2, rtol=1e-2)
    assert len(out) == LENGTH

    qkv = reserved(LENGTH, 1, KV_HEADS * (GROUP + 2) * SIZE)
    qkv[-1] = torch.randn(qkv.shape[2]).to(BF16)
    cos, sin = torch.ones(LENGTH, SIZE // 2), reserved(LENGTH, SIZE // 2, dtype=torch.float32)
    options = {"kv_heads": KV_HEADS, "value_gate": False, "output_gate": False}
    q, k, v, _ = fused_split_rotate_gate(qkv, None, cos, sin, **options)
    heads = qkv[-1, 0].unflatten(0, (KV_HEADS, GROUP + 2, SIZE))[-1]
    assert torch.equal(q[0, -1, -GROUP:], heads[:GROUP])
    assert torch.equal(k[0, -1, -1], heads[-2])
    assert torch.equal(v[0, -1, -1], heads[-1])
