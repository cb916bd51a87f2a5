"""Tests attention whose backward pass also computes the indexer's gradients.

Tests run on a Hopper GPU, or with small shapes in Triton's interpreter. Results are compared with the fp64 reference.
Attention's output and gradients must also be equal, bit for bit, to the results of the kernels that compute no indexer
loss.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from covering import covered
from fused_loss_cases import (
    LOSS_SCALE,
    TRAINING,
    assert_attention_is_untouched,
    assert_equal,
    check,
    devices,
    make_case,
    run,
)
from loss_problems import make_problem
from poison import poison_buffers

from gsa_kernels import api
from gsa_kernels.attention import triton_backward, triton_backward_keys, triton_forward, triton_packed_mask
from gsa_kernels.fused.gates import rows as gate_rows
from gsa_kernels.hopper import fused_indexer_loss as op
from gsa_kernels.hopper import target_blocks
from gsa_kernels.hopper.fused_indexer_loss import attention_with_indexer_loss, can_fuse_indexer_loss
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.loss import op as loss_op
from gsa_kernels.loss import triton_launch
from gsa_kernels.types import FusedLoss


@devices
@covered(
    "case",
    length=[1, 33, 100],
    heads=[(4, 1), (8, 2), (8, 1)],
    head_size=[32, 64, 256],
    indexer=[(1, 16), (2, 16), (4, 16), (8, 64)],
    activation=["sigmoid", "relu"],
    gated=[True, False],
    documents=[False, True],
    query_start=[0, 37, 64],
    log_sum=[False, True],
    chunk_bytes=[None, 1],
)
def test_output_and_gradients(device: str, case: dict[str, Any]) -> None:
    options = dict(case)
    length, chunk_bytes = options.pop("length"), options.pop("chunk_bytes")
    made = make_case(length, device, **options)
    assert_attention_is_untouched(made, check(made, chunk_bytes=chunk_bytes))


@devices
def test_a_single_key(device: str) -> None:
    """The key is mostly not the query's own; its probability is 1."""
    case = make_case(70, device, documents=True)
    best = torch.where(case.problem.mask, torch.rand(case.problem.mask.shape).to(device), -1.0).argmax(-1)
    mask = torch.zeros_like(case.problem.mask).scatter_(-1, best[..., None], True)
    check(replace(case, problem=case.problem.attending_to(mask)))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1000, {"documents": True, "batch": 2}),
        (2048, {"query_start": 1024, "gated": False, "log_sum": True}),
        (1000, {"heads": (24, 2), "head_size": 256, "documents": True}),
        (2048, {"heads": (16, 2), "head_size": 256, "query_start": 1024}),
        (700, {"query_start": 333, "documents": True, "head_size": 64, "activation": "relu"}),
        (2048, {"indexer": (8, 64), "activation": "relu", "documents": True, "log_sum": True}),
        (1000, {"indexer": (8, 128), "activation": "relu", "query_start": 500, "batch": 2}),
    ],
    ids=str,
)
def test_long_sequences(length: int, options: dict[str, Any]) -> None:
    """Shapes have several chunks of rows and segments of keys. Five repetitions agree in bits."""
    case = make_case(length, "cuda", **{**TRAINING, **options})
    got = check(case, chunk_bytes=2**22)
    assert_attention_is_untouched(case, got)
    for _ in range(5):
        assert_equal(run(case), got)


@devices
def test_chunks_and_repetitions_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target takes two bytes for each four heads and key."""
    calls: list[tuple[int, int]] = []

    def recorded(*arguments: Any) -> torch.Tensor:
        rows = arguments[-1]
        calls.append((rows.start, rows.stop))
        target = backward_queries_with_target(*arguments)
        assert target.dtype == torch.float16
        assert target.shape == (1, 2, 2 * -(-len(rows) // 64), 6, 32 * 32)
        return target

    monkeypatch.setattr(op, "backward_queries_with_target", recorded)
    case = make_case(150, device, heads=(8, 2), documents=True)
    whole = run(case)
    row_bytes = 2 * 2 * 150
    for chunk_bytes, ends in (
        (None, (0, 150)),
        (1, (0, 64, 128, 150)),
        (128 * row_bytes, (0, 128, 150)),
    ):
        calls.clear()
        assert_equal(run(case, chunk_bytes=chunk_bytes), whole)
        assert calls == list(pairwise(ends))


@devices
@pytest.mark.parametrize(
    "options",
    [
        {"documents": True, "log_sum": True},
        {"query_start": 64},
        {"activation": "relu"},
        {"indexer": (8, 64), "activation": "relu", "log_sum": True},
        {"indexer": (8, 128), "documents": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_nobody_reads_the_loss(device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL is not computed. Gradients have the bits of a step that logs the loss."""
    case = make_case(70, device, **options)
    if device == "cuda":
        case = make_case(1536, device, **{**TRAINING, **options})
    read = run(case)
    poison_buffers(monkeypatch, loss_op, triton_launch)
    unread = run(case, read=False)
    assert_equal({"rows": read["rows"], **unread}, read)
    assert all(value.isfinite().all() for value in unread.values())


@devices
def test_everything_is_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All buffers begin with NaN, which must not reach a result. Because of the document starts, the last query tiles
    skip the first key tile."""
    case = make_case(130, device, documents=True)
    starts = case.problem.geometry.document_starts
    assert starts is not None
    assert (starts[:, 96:] > 64).all()
    clean = run(case, chunk_bytes=1)
    attention = (triton_forward, triton_backward, triton_backward_keys, target_blocks, triton_packed_mask)
    poison_buffers(
        monkeypatch, op, *attention, gate_rows, loss_op, triton_launch, make=("empty", "empty_like")
    )
    assert triton_launch.scratch(1, dtype=torch.bfloat16, device=torch.device(device)).isnan().all()
    got = run(case, chunk_bytes=1)
    assert all(value.isfinite().all() for value in got.values())
    assert_equal(got, clean)


@devices
def test_the_scale_is_of_the_indexer_alone(device: str) -> None:
    case = make_case(50, device)
    once, twice, never = (run(case, scale=scale) for scale in (1.0, 2.0, 0.0))
    for name, want in once.items():
        scaled = name in case.problem.tensors
        assert want.any(), name
        assert torch.equal(twice[name], 2 * want if scaled else want), name
        assert torch.equal(never[name], torch.zeros_like(want) if scaled else want), name


@devices
def test_strides_do_not_matter(device: str) -> None:
    """Inputs have the order [L, B, ...] or are slices of a projection, and the gradient is expanded."""
    case = make_case(33, device, batch=2, heads=(8, 2))
    case = replace(case, grad=case.grad[:1, :1, :1, :1].expand(case.grad.shape))
    assert case.gate_logits is not None
    views = case.tensors | {"gate_logits": case.gate_logits.unflatten(2, (2, 4))}
    for name, tensor in views.items():
        if tensor.ndim > 2:  # every second head, or row of a memory for two
            dim = 3 if tensor.ndim > 3 else 2
            inner = torch.stack([tensor, torch.full_like(tensor, 7)], dim)
            views[name] = inner.transpose(0, 1).contiguous().transpose(0, 1).select(dim, 0)
            assert not views[name].is_contiguous()
    expected = run(replace(case, grad=case.grad.contiguous()))
    got = run(case.with_tensors(views))
    got["gate_logits"] = got["gate_logits"].flatten(2, 3)
    assert_equal(got, expected)
    # TMA requires keys aligned to 16 bytes, so this runs without TMA.
    wide = torch.nn.functional.pad(case.problem.k, (1, 0))
    check(case.with_tensors(case.tensors | {"k": wide[..., 1:]}))


@devices
def test_what_needs_no_gradient_gets_none(device: str) -> None:
    case = make_case(40, device)
    whole = run(case)
    for trained in (tuple(case.attended), tuple(case.problem.tensors), ("keys",)):
        leaves = {n: t.detach().clone().requires_grad_(n in trained) for n, t in case.tensors.items()}
        made = case.with_tensors(leaves)
        x, loss = made.problem, FusedLoss(made.problem.indexer, LOSS_SCALE)
        given = (x.selection, x.geometry, loss, made.gate_logits)
        out, _ = api.sparse_attention_with_loss(x.q, x.k, made.v, *given, implementation="triton")  # type: ignore[arg-type]
        out.backward(case.grad)
        for name, leaf in leaves.items():
            if name in trained:
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, whole[name]), name
            else:
                assert leaf.grad is None, name


@devices
def test_errors(device: str) -> None:
    case = make_case(40, device, batch=2, gated=False)
    problem, v = case.problem, case.v
    q, k, indexer, selection = problem.q, problem.k, problem.indexer, problem.selection
    assert selection is not None
    mask = selection.packed_mask
    assert mask is not None
    loss, log_sum = FusedLoss(indexer, 1.0), torch.zeros(2, 40, device=device)
    good = {"q": q, "k": k, "v": v, "selection": selection, "geometry": problem.geometry, "loss": loss}

    def of_indexer(batch: int, first: int) -> dict[str, Any]:
        x = {n: t[:batch, first:] for n, t in problem.tensors.items() if t.ndim > 1}
        return {"loss": replace(loss, indexer=replace(indexer, **x))}

    def selected(**changes: Any) -> dict[str, Any]:
        return {"selection": replace(selection, **changes)}

    lists = make_problem("key lists", 40, device).selection
    bad: list[tuple[dict[str, Any], str]] = [
        ({"q": q[:, :, :2]}, "2 heads and k has 1; pass bf16 and 4 heads"),
        ({"k": k.expand(-1, -1, 2, -1), "v": v.expand(-1, -1, 2, -1)}, "4 heads and k has 2; pass bf16"),
        ({"q": q.float(), "k": k.float(), "v": v.float()}, r"q is torch\.float32 .*; pass bf16 and 4 heads"),
        ({"k": k.half()}, r"k is torch\.float16 on .* and q torch\.bfloat16"),
        ({"v": v[:, 1:]}, "v has shape"),
        ({"geometry": replace(problem.geometry, query_start=1)}, "k has shape"),
        ({"selection": lists}, "selection has key lists"),
        (selected(packed_mask=mask[..., :1]), "packed_mask has shape"),
        (selected(packed_mask=mask.long()), r"packed_mask is torch\.int64 on .*; pass int32"),
        (selected(log_sum=log_sum[:, 1:]), r"log_sum has shape \(2, 39\)"),
        (selected(log_sum=log_sum.double()), r"log_sum has dtype torch\.float64; pass float32"),
        (of_indexer(1, 0), r"indexer\.queries has shape \(1, 40, 2, 16\) and q \(2, 40, 4, 32\)"),
        (of_indexer(2, 1), r"indexer\.queries has shape \(2, 39, 2, 16\) and q \(2, 40, 4, 32\)"),
        ({"row_chunk_bytes": 0}, "row_chunk_bytes is 0"),
    ]
    for changed, message in bad:
        with pytest.raises(ValueError, match=message):
            attention_with_indexer_loss(**{**good, **changed})


@devices
def test_what_can_be_fused(device: str) -> None:
    def of(heads: int, kv_heads: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        q, k = (torch.zeros(1, 1, n, 32, dtype=dtype, device=device) for n in (heads, kv_heads))
        return can_fuse_indexer_loss(q, k)

    assert [of(heads, 2) for heads in (2, 4, 8, 12, 16)] == [False, False, True, False, True]
    for other in (torch.float16, torch.float32):
        assert not of(8, 1, other)
