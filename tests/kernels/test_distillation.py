"""Attention whose backward pass also gives the indexer's gradients: against the references in fp64, and to the bit
against `masked_attention`. On CUDA where there is a device of its kind, else small in Triton's interpreter."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from distillation_cases import (
    ATTENDED,
    INDEXER,
    LOSS_SCALE,
    ON_HOPPER,
    TARGET_EPS,
    assert_attention_is_untouched,
    assert_equal,
    check,
    devices,
    distil,
    dtypes,
    log_sum_of,
    make_case,
    name_of,
)
from poison import poison_buffers

from gsa_kernels import sparse_attention
from gsa_kernels.attention import triton_backward, triton_backward_keys, triton_forward
from gsa_kernels.attention import triton_packed_mask as triton_words
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_backward import attention_backward, backward_rows
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.fused.gates import rows as gate_rows
from gsa_kernels.hopper import fused_indexer_loss as op
from gsa_kernels.hopper import target_blocks
from gsa_kernels.hopper.fused_indexer_loss import attention_with_indexer_loss, can_fuse_indexer_loss
from gsa_kernels.hopper.target_blocks import rows_of_blocks
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.indexer_loss import op as kl_op
from gsa_kernels.indexer_loss import triton_launch
from gsa_kernels.limits import FUSED_LOSS_HEADS
from gsa_kernels.sampling import SampledRows

BF16, FP16 = torch.bfloat16, torch.float16
CASES: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    (1, BF16, {}),
    (33, BF16, {"heads": 8, "kv_heads": 2, "batch": 2, "documents": True}),
    (70, FP16, {"heads": 8, "query_start": 37, "documents": True, "gated": False}),
    (100, BF16, {"heads": 8, "kv_heads": 2, "activation": "relu"}),
    (128, BF16, {"query_start": 64}),
    (128, FP16, {"activation": "relu", "documents": True}),
    (100, BF16, {"single": True, "documents": True}),
    (100, FP16, {"single": True}),
    (33, BF16, {"heads": 8, "head_size": 64, "indexer_heads": 4, "gated": False, "query_start": 100}),
    (70, BF16, {"indexer_heads": 1, "documents": True}),
]


@devices
@pytest.mark.parametrize(("length", "dtype", "options"), CASES, ids=name_of)
def test_output_and_gradients(device: str, length: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(length, device=device, dtype=dtype, **options)
    assert_attention_is_untouched(case, check(case))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper")
@dtypes
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1000, {"documents": True, "batch": 2}),
        (2048, {"query_start": 1024, "gated": False}),
        (700, {"query_start": 333, "documents": True, "head_size": 64, "activation": "relu"}),
    ],
    ids=name_of,
)
def test_long_sequences(length: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """In several chunks of rows and segments of keys, with heads as in training."""
    sizes: dict[str, Any] = {
        "heads": 16,
        "kv_heads": 4,
        "head_size": 128,
        "indexer_heads": 4,
        "indexer_size": 64,
    }
    case = make_case(length, device="cuda", dtype=dtype, **{**sizes, **options})
    got = check(case, row_chunk_bytes=2**22)
    assert_attention_is_untouched(case, got)
    assert_equal(distil(case).items(), got.items())


@devices
@dtypes
def test_chunks_change_nothing(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit; of their size what the target takes, two bytes for each four heads and key."""
    calls: list[tuple[int, int]] = []

    def recorded(*arguments: Any) -> torch.Tensor:
        rows = arguments[-1]
        calls.append((rows.start, rows.stop))
        target = backward_queries_with_target(*arguments)
        assert target.dtype == torch.float16
        assert target.shape == (1, 2, 2 if len(rows) <= 64 else 4, 4, 32 * 32)
        return target

    monkeypatch.setattr(op, "backward_queries_with_target", recorded)
    case = make_case(70, device=device, dtype=dtype, heads=8, kv_heads=2, documents=True)
    whole = distil(case)
    assert calls == [(0, 70)]
    row_bytes = 2 * 2 * 70
    for row_chunk_bytes, ends in ((1, (0, 32, 64, 70)), (64 * row_bytes, (0, 64, 70))):
        calls.clear()
        assert_equal(distil(case, row_chunk_bytes=row_chunk_bytes).items(), whole.items())
        assert calls == list(pairwise(ends))


@devices
def test_runs_agree_to_the_bit(device: str) -> None:
    case = make_case(60 if device == "cpu" else 1024, device=device, heads=8, kv_heads=2)
    first = distil(case)
    for _ in range(1 if device == "cpu" else 5):
        assert_equal(distil(case).items(), first.items())


@devices
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, BF16),
        ({"documents": True}, FP16),
        ({"query_start": 64}, BF16),
        ({"activation": "relu"}, BF16),
        ({"activation": "relu", "documents": True}, FP16),
    ],
    ids=name_of,
)
def test_nobody_reads_the_loss(
    device: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KL is not calculated then; a step whose loss is logged has the same gradients to the bit."""
    sizes: dict[str, Any] = {"indexer_heads": 2, "indexer_size": 16}
    if device == "cuda":  # as in training
        sizes = {"heads": 16, "kv_heads": 4, "head_size": 128, "indexer_heads": 4, "indexer_size": 64}
    case = make_case(70 if device == "cpu" else 1536, device=device, dtype=dtype, **sizes, **options)
    for log_sum in (None,) if case.activation == "relu" else (None, log_sum_of(case)):
        read = distil(case, log_sum=log_sum)
        poison_buffers(monkeypatch, kl_op, triton_launch)
        unread = distil(case, log_sum=log_sum, on_rows=None)
        monkeypatch.undo()
        assert_equal({"rows": read.rows, **unread.items()}, read.items())
        assert all(grad.isfinite().all() for grad in unread.grads.values())


@devices
def test_everything_is_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All buffers begin as NaN; none reaches a result. The last tiles of queries see none of the first tile of keys."""
    case = make_case(130, device=device, documents=True)
    assert case.document_starts is not None
    assert (case.document_starts[:, 96:] > 64).all()
    clean = distil(case, row_chunk_bytes=1)
    attention = (triton_forward, triton_backward, triton_backward_keys, target_blocks, triton_words)
    poison_buffers(monkeypatch, op, *attention, gate_rows, kl_op, triton_launch, make=("empty", "empty_like"))
    assert triton_launch.scratch(1, dtype=BF16, device=torch.device(device)).isnan().all()
    got = distil(case, row_chunk_bytes=1)
    assert all(value.isfinite().all() for value in got.items().values())
    assert_equal(got.items(), clean.items())


@devices
@dtypes
def test_the_future_is_not_seen(device: str, dtype: torch.dtype) -> None:
    """By queries before a token that changes; nor are the gradients of later outputs."""
    cut, start = 41, 20
    case = make_case(70, device=device, dtype=dtype, query_start=start)
    before = distil(case).items()
    rng = torch.Generator().manual_seed(1)
    own = ("q", "output_gate_logits", "q_idx", "weight_logits")
    changed = {name: case.inputs[name][:, cut:] for name in own}
    changed |= {name: case.inputs[name][:, start + cut :] for name in ("k", "v", "k_idx")}
    for part in (*changed.values(), case.grad[:, cut:]):
        part.copy_(50 * torch.randn(part.shape, generator=rng))
    after = distil(case).items()
    for name in ("out", "rows", *own):
        assert torch.equal(after[name][:, :cut], before[name][:, :cut]), name
        assert not torch.equal(after[name], before[name]), name


@devices
def test_the_scale_is_of_the_indexer_alone(device: str) -> None:
    case = make_case(50, device=device)
    once, twice, never = (distil(case, loss_scale=scale).items() for scale in (1.0, 2.0, 0.0))
    for name, want in once.items():
        assert want.any(), name
        assert torch.equal(twice[name], 2 * want if name in INDEXER else want), name
        assert torch.equal(never[name], torch.zeros_like(want) if name in INDEXER else want), name


@devices
def test_softmax_scale(device: str) -> None:
    """Half of it is half of q."""
    case = make_case(50, device=device, documents=True)
    got = distil(case, softmax_scale=0.5 * 32**-0.5).items()
    case.inputs["q"] = case.inputs["q"] / 2
    wanted = distil(case).items()
    wanted["q"] = wanted["q"] / 2
    assert_equal(got, wanted)


@devices
def test_strides_do_not_matter(device: str) -> None:
    """[L, B, ...] memory, slices of fused projections, and an expanded gradient."""
    case = make_case(33, device=device, batch=2, heads=8, kv_heads=2)
    gate = case.inputs["output_gate_logits"].unflatten(2, (2, 4))
    case.grad = case.grad[:1, :1, :1, :1].expand(case.grad.shape)
    views = dict(case.inputs, output_gate_logits=gate)
    for name, tensor in views.items():
        if tensor.ndim > 2:  # every second head, or row of the memory of two
            inner = torch.stack([tensor, torch.full_like(tensor, 7)], 3 if tensor.ndim > 3 else 2)
            memory = inner.transpose(0, 1).contiguous().transpose(0, 1)
            views[name] = memory.select(3 if tensor.ndim > 3 else 2, 0)
            assert not views[name].is_contiguous()
    expected = distil(replace(case, grad=case.grad.contiguous())).items()
    got = distil(replace(case, inputs=views)).items()
    got["output_gate_logits"] = got["output_gate_logits"].flatten(2, 3)
    assert_equal(got, expected)
    # Without the copy engine, which wants keys aligned to 16 bytes.
    wide = torch.nn.functional.pad(case.inputs["k"], (1, 0))
    case.inputs["k"] = wide[..., 1:]
    check(case)


@devices
def test_what_needs_no_gradient_gets_none(device: str) -> None:
    case = make_case(40, device=device)
    whole = distil(case).grads
    for trained in (ATTENDED, INDEXER, ("k_idx",)):
        leaves = {n: t.detach().clone().requires_grad_(n in trained) for n, t in case.inputs.items()}
        out, _ = attention_with_indexer_loss(**leaves, words=case.words, loss_scale=LOSS_SCALE)  # type: ignore[arg-type]
        out.backward(case.grad)
        for name, leaf in leaves.items():
            if name in trained:
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, whole[name]), name
            else:
                assert leaf.grad is None, name


@devices
def test_a_trace_tells_the_loss_from_attention(device: str) -> None:
    case = make_case(40, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        distil(case)
    named = [event for event in traced.events() if event.name in ("kl", "attention")]
    assert sorted(event.name for event in named) == ["attention", "kl"]
    target = next(event for event in named if event.name == "attention")
    around = []
    while (target := target.cpu_parent) is not None:
        around.append(target.name)
    assert "kl" in around


@devices
def test_the_log_sum_spares_a_pass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernels for bf16. A wrong one shows in the gradients: it is read."""
    case = make_case(70, device=device, heads=8, kv_heads=2, documents=True, query_start=20)
    log_sum = log_sum_of(case)
    kernels: list[list[str]] = []
    launches = triton_launch.chunk_launches

    def recorded(*arguments: Any) -> dict[str, Any]:
        made = launches(*arguments)
        kernels.append(list(made))
        return made

    monkeypatch.setattr(triton_launch, "chunk_launches", recorded)
    got = check(case, log_sum=log_sum)
    assert kernels == [["gradients", "reduce"]]
    off = distil(case, log_sum=log_sum + 0.05)
    assert (off.grads["k_idx"] - got.grads["k_idx"]).norm() > 0.02 * got.grads["k_idx"].norm()


@devices
@pytest.mark.parametrize(("kv_heads", "documents"), [(2, False), (1, True)], ids=["4", "8 documents"])
def test_parts_of_the_target(
    device: str, kv_heads: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of its own four heads, and their sum is what the loss is given else. Of ranges of rows: others are not
    written, nor where no query of a tile sees a key."""
    case = make_case(
        130, device=device, heads=8, kv_heads=kv_heads, gated=False, documents=documents, query_start=30
    )
    q, k, v = (case.inputs[name] for name in ATTENDED[:3])
    support: dict[str, Any] = {"document_starts": case.document_starts, "query_start": 30}
    out, lse = masked_attention(q, k, v, case.words, **support)
    scale = 32**-0.5
    _, _, delta, lse2 = backward_rows(case.grad, out, lse, None)
    grad_q, *_ = attention_backward(
        case.grad, q, k, v, out, lse, case.words, case.document_starts, None, scale
    )
    poison_buffers(monkeypatch, target_blocks)
    for rows in (range(130), range(32, 96), range(96, 130)):
        own = slice(rows.start, rows.stop)
        got_q = torch.full_like(q, float("nan"))
        arguments = (case.grad, q, k, v, delta, lse2, case.words, case.document_starts, scale)
        blocks = backward_queries_with_target(*arguments, got_q, rows)
        target = rows_of_blocks(blocks, len(rows), 160)
        assert torch.equal(got_q[:, own], grad_q[:, own])
        assert got_q[:, : rows.start].isnan().all()
        assert got_q[:, rows.stop :].isnan().all()

        mask = case.mask[:, own]
        near = {"rtol": 1.25 * TARGET_EPS, "atol": 2.0**-23}
        for part, found in enumerate(target.unbind(1)):
            first = FUSED_LOSS_HEADS * part
            heads, kv_head = slice(first, first + FUSED_LOSS_HEADS), first * kv_heads // 8
            of_head = (x[:, :, kv_head : kv_head + 1].double() for x in (k, v))
            exact = sparse_attention(
                q[:, own, heads].double(), *of_head, mask, return_probs=True
            ).head_sum_probs
            assert exact is not None
            torch.testing.assert_close(found[mask].double(), exact[mask], **near)
        sums = head_sum_probs_rows(q, k, lse, case.words, SampledRows(rows.start, len(rows)), **support)
        torch.testing.assert_close(target.float().sum(1)[mask], sums[mask], **near)

        positions = 30 + torch.arange(130, device=device)[own]
        visible = torch.arange(160, device=device) <= positions[:, None]
        if case.document_starts is not None:
            visible = visible & (torch.arange(160, device=device) >= case.document_starts[:, own, None])
        unselected = (visible & ~mask)[:, None].expand_as(target)
        assert (target[unselected] == 0).all()
        if documents and rows.start == 96:
            assert target[..., :64].isnan().all()


@devices
def test_errors(device: str) -> None:
    case = make_case(40, device=device, batch=2)
    good = {
        **case.inputs,
        "words": case.words,
        "loss_scale": 1.0,
        "document_starts": torch.zeros(2, 40, dtype=torch.int32, device=device),
    }
    q, k, v = (case.inputs[name] for name in ATTENDED[:3])
    ungated: dict[str, Any] = {"output_gate_logits": None}
    one_sequence = {name: case.inputs[name][:1] for name in INDEXER[:3]}
    shorter = {name: case.inputs[name][:, 1:] for name in INDEXER[:3]}
    log_sum = torch.zeros(2, 40, device=device)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"q": q[:, :, :2], **ungated}, "2 heads and k has 1; pass bf16 or fp16, 4 heads"),
        (
            {"k": k.expand(-1, -1, 2, -1), "v": v.expand(-1, -1, 2, -1), **ungated},
            "4 heads and k has 2; pass bf16",
        ),
        (
            {"q": q.float(), "k": k.float(), "v": v.float(), **ungated},
            "q is torch.float32 .* pass bf16 or fp16",
        ),
        ({"k": k.half()}, "k has dtype torch.float16 and q torch.bfloat16"),
        ({"v": v[:, 1:]}, "v has shape"),
        ({"query_start": 1}, "k has shape"),
        ({"words": case.words[..., :1]}, "words has shape"),
        ({"words": case.words.long()}, "words has dtype torch.int64; pass int32"),
        ({"document_starts": torch.zeros(2, 40, device=device)}, "document_starts has dtype .* pass int32"),
        ({"log_sum": log_sum[:, 1:]}, r"log_sum has shape \(2, 39\)"),
        ({"log_sum": log_sum.double()}, "log_sum has dtype torch.float64; pass float32"),
        (one_sequence, r"q_idx has shape \(1, 40, 2, 16\) and q \(2, 40, 4, 32\)"),
        (shorter, r"q_idx has shape \(2, 39, 2, 16\) and q \(2, 40, 4, 32\)"),
        ({"k_idx": case.inputs["k_idx"][:, 1:]}, "k_idx has shape"),
        ({"weight_logits": case.inputs["weight_logits"][..., 1:]}, "weight_logits has shape"),
        ({"activation": "relu"}, "score_bias"),
        ({"row_chunk_bytes": 0}, "row_chunk_bytes is 0"),
        ({"words": None}, "words is None"),
        ({"inverse_temperature": torch.ones(2, device=device)}, r"inverse_temperature has shape \(2,\)"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
    ]
    for changed, message in bad:
        with pytest.raises(ValueError, match=message):
            attention_with_indexer_loss(**{**good, **changed})


@devices
def test_what_can_distil(device: str) -> None:
    def of(heads: int, kv_heads: int, dtype: torch.dtype) -> bool:
        q, k = (torch.zeros(1, 1, n, 32, dtype=dtype, device=device) for n in (heads, kv_heads))
        return can_fuse_indexer_loss(q, k)

    assert [of(heads, 2, BF16) for heads in (2, 4, 8, 12, 16)] == [False, False, True, False, True]
    assert of(8, 1, FP16)
    assert not of(8, 1, torch.float32)
