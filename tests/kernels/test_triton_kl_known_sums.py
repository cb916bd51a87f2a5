"""The indexer's loss where the sum of the target is known, or also the log-sum-exp of the scores: no first pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_kl import (
    STACKED,
    Problem,
    _poisoned_memory,  # noqa: F401 (a fixture)
    check,
    compute,
    device_of,
    make_problem,
    pack_words,
)

from gsa_kernels import indexer_scores
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.indexer_loss import triton_launch
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.selection.op import select_keys

TARGET_SUM = 3.0


def scale_target(problem: Problem) -> None:
    """Rows of the target sum to TARGET_SUM over the support."""
    inside = problem.target * problem.support
    problem.target = TARGET_SUM * problem.target / inside.sum(-1, keepdim=True).clamp(min=1e-30)


def log_sums(problem: Problem) -> torch.Tensor:
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    beta = inputs.pop("inverse_temperature")
    projections = [inputs.pop(name) for name in ("q_idx", "k_idx", "weight_logits")]
    scores = beta * indexer_scores(*projections, **inputs, activation=problem.activation)  # type: ignore[arg-type]
    return scores.masked_fill(~problem.support, float("-inf")).logsumexp(-1).float()


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (100, {"sparse": True, "batch": 1}),
        (100, {"documents": True, "heads": 3, "dim": 24}),
        (330, {"heads": 2, "block": 16, "batch": 1, "sparse": True, "documents": True}),
        (70, {"dtype": torch.bfloat16, "dim": 64, "sparse": True, "batch": 1}),
        (33, {"activation": "relu", "beta": 0.6}),
        (50, {"size": 6.0, "beta": 5.0}),
    ],
    ids=["sparse", "documents", "blocks", "bf16", "relu", "saturated"],
)
def test_known_sums(device: str, length: int, options: dict[str, Any]) -> None:
    problem = make_problem(length, device=device, **options)
    scale_target(problem)
    check(problem, blocks=STACKED, target_sum=TARGET_SUM)
    check(problem, blocks=STACKED, target_sum=TARGET_SUM, log_sum=log_sums(problem))


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
def test_rows_without_support(device: str) -> None:
    """0 in value and gradient; in chunks of one tile of rows."""
    problem = make_problem(90, device=device, sparse=True, batch=1)
    problem.support[:, 40] = False
    problem.words = pack_words(problem.support)
    scale_target(problem)
    for known in ({}, {"log_sum": log_sums(problem)}):
        options: dict[str, Any] = {"blocks": STACKED, "target_sum": TARGET_SUM, "row_chunk_bytes": 1, **known}
        _, rows, grads = compute(problem, **options)
        assert (rows[:, 40] == 0).all()
        assert (grads["q_idx"][:, 40] == 0).all()
        assert (grads["weight_logits"][:, 40] == 0).all()
        check(problem, **options)


@device_of
def test_a_wrong_log_sum_shows_in_the_gradient_and_hardly_in_the_value(device: str) -> None:
    """So it is read; and the value has an error of second order, here 1e-3 squared, per row."""
    problem = make_problem(64, device=device, sparse=True, batch=1)
    scale_target(problem)
    options: dict[str, Any] = {"blocks": STACKED, "target_sum": TARGET_SUM}
    total, _, grads = compute(problem, **options, log_sum=log_sums(problem))
    off_total, _, off = compute(problem, **options, log_sum=log_sums(problem) + 1e-3)
    assert 0 < (off_total - total).abs() < 64 * 1e-6
    difference = (off["k_idx"] - grads["k_idx"]).norm() / grads["k_idx"].norm()
    assert 1e-5 < difference < 1e-2


@device_of
def test_value_near_its_minimum(device: str) -> None:
    """Target = softmax of the scores, but for 1%: 7e-5 nats a row, relatively exact, from sums known to 1e-6."""
    problem = make_problem(100, device=device, batch=1)
    known = log_sums(problem)
    generator = torch.Generator().manual_seed(5)
    noise = 1 + 0.012 * torch.randn(100, 100, generator=generator).to(device)
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    beta = inputs.pop("inverse_temperature")
    projections = [inputs.pop(name) for name in ("q_idx", "k_idx", "weight_logits")]
    scores = beta * indexer_scores(*projections, **inputs)  # type: ignore[arg-type]
    q = scores.masked_fill(~problem.support, float("-inf")).softmax(-1)
    problem.target = (q * noise).float()
    scale_target(problem)
    p = problem.target.double() * problem.support
    p = p / p.sum(-1, keepdim=True)
    exact = torch.where(p > 0, p * (p.log() - q.log()), 0).nan_to_num(0.0).sum()
    assert 2e-5 < exact / 100 < 2e-4
    for changes in ({}, {"log_sum": known}):
        total, _, _ = compute(problem, blocks=STACKED, target_sum=TARGET_SUM, **changes)
        torch.testing.assert_close(total.double(), exact, rtol=3e-5, atol=0)


@device_of
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
def test_sums_of_selection_and_attention(
    device: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training: selection and attention give the sums. Equal to the loss that calculates them, without its
    first pass."""
    gpu = device == "cuda"
    length, dtype = (700, torch.bfloat16) if gpu else (40, torch.float32)
    problem = make_problem(
        length, device=device, dtype=dtype, dim=64 if gpu else 16, batch=1, documents=documents
    )
    inputs = dict(problem.inputs)
    beta = inputs.pop("inverse_temperature")
    projections = [inputs.pop(name) for name in ("q_idx", "k_idx", "weight_logits")]
    starts = problem.document_starts
    budget: dict[str, Any] = {"k_base": 24, "k_min": 8, "k_max": 40, "mode": "inverse", "local_window": 4}
    ema = torch.tensor(0.02, device=device)
    selection = select_keys(
        *projections, ema, **inputs, **budget, document_starts=starts, inverse_temperature=beta
    )
    problem = replace(problem, words=selection.words, support=unpack_mask(selection.words, length))
    heads, head_dim = (16, 128) if gpu else (2, 32)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, length, n, head_dim, generator=generator).to(device, dtype)
        for n in (heads, heads // 2, heads // 2)
    )
    _, lse = masked_attention(q, k, v, selection.words, document_starts=starts)
    options: dict[str, Any] = {"blocks": None if gpu else STACKED}
    options["target_rows"] = lambda rows: head_sum_probs_rows(
        q,
        k,
        lse,
        selection.words,
        rows,
        document_starts=starts,
        dtype=torch.float16 if gpu else torch.float32,
    )
    total, rows, grads = compute(problem, **options)
    half_total, _, half = compute(problem, **options, target_sum=heads)
    kernels = []
    launches = triton_launch.chunk_launches
    monkeypatch.setattr(
        triton_launch,
        "chunk_launches",
        lambda *arguments: (made := launches(*arguments), kernels.append(list(made)))[0],
    )
    got_total, got_rows, got = compute(problem, **options, target_sum=heads, log_sum=selection.log_sum)
    assert kernels == [["gradients", "reduce"]]
    loose = 1e-4 if gpu else 1e-5
    torch.testing.assert_close(half_total, total, rtol=loose, atol=0)
    torch.testing.assert_close(got_total, total, rtol=loose, atol=0)
    torch.testing.assert_close(got_rows, rows, rtol=1e-3, atol=1e-5)
    for name, want in grads.items():
        for other in (half[name], got[name]):
            error = (other.double() - want.double()).norm() / want.double().norm()
            assert error < (4e-3 if gpu else 3e-5), f"{name}: {error}"


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("batch", [1, 2])
def test_known_sums_at_the_shape_of_training(documents: bool, batch: int) -> None:
    """bf16, 4 heads of 64, several segments and chunks of rows."""
    problem = make_problem(
        1100, device="cuda", dtype=torch.bfloat16, dim=64, sparse=True, documents=documents, batch=batch
    )
    scale_target(problem)
    check(problem)
    check(problem, target_sum=TARGET_SUM, log_sum=log_sums(problem), row_chunk_bytes=2**21)


def test_errors() -> None:
    problem = make_problem(10, device="cpu")
    for changed, message in (
        ({"log_sum": torch.zeros(2, 10)}, "both or none"),
        ({"log_sum": torch.zeros(2, 10).double(), "target_sum": 1.0}, "float32"),
        ({"log_sum": torch.zeros(2, 9), "target_sum": 1.0}, "log_sum has shape"),
        ({"target_sum": 0.0}, "target_sum is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            compute(problem, **changed)
