"""Creates problems of the indexer loss in attention's backward pass, and the expected results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_devices import CPU
from loss_problems import Problem, make_problem

from gsa_kernels import api
from gsa_kernels.hopper.fused_indexer_loss import attention_with_indexer_loss
from gsa_kernels.types import FusedLoss

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.hopper])
devices = pytest.mark.parametrize("device", [CPU, GPU])

ATTENDED = ("q", "k", "v", "gate_logits")
LOSS_SCALE = 0.375
TARGET_EPS = 2.0**-10
"""Tolerance for two roundings of the fp16 target: of its parts, and of their sum in the loss."""
TRAINING: dict[str, Any] = {"heads": (16, 4), "head_size": 128, "indexer": (4, 64)}


@dataclass(frozen=True)
class Fused:
    problem: Problem
    v: torch.Tensor
    gate_logits: torch.Tensor | None
    grad: torch.Tensor
    """Gradient of the output."""

    @property
    def attended(self) -> dict[str, torch.Tensor]:
        given = {"q": self.problem.q, "k": self.problem.k, "v": self.v, "gate_logits": self.gate_logits}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.attended | self.problem.tensors

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> Fused:
        of_indexer = {name: tensors[name] for name in self.problem.tensors}
        problem = replace(
            self.problem, q=tensors["q"], k=tensors["k"], indexer=replace(self.problem.indexer, **of_indexer)
        )
        return replace(self, problem=problem, v=tensors["v"], gate_logits=tensors.get("gate_logits"))


def make_case(length: int, device: str, *, gated: bool = True, **options: Any) -> Fused:
    options = {"dtype": torch.bfloat16, "batch": 1, "indexer": (2, 16), **options}
    problem = make_problem("packed mask", length, device, **options)
    rng = torch.Generator().manual_seed(length)
    v, gate, grad = (
        torch.randn(like.shape, generator=rng).to(device, torch.bfloat16)
        for like in (problem.k, problem.q, problem.q)
    )
    return Fused(problem, v, gate if gated else None, grad)


Results = dict[str, torch.Tensor]


def run(
    case: Fused,
    *,
    scale: float = LOSS_SCALE,
    chunk_bytes: int | None = None,
    read: bool = True,
    implementation: Any = "triton",
    dtype: torch.dtype | None = None,
) -> Results:
    """Return output, KL of the rows if read, and all gradients."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in case.tensors.items()}
    with_leaves = case.with_tensors(leaves)
    rows: list[torch.Tensor] = []
    attend: Any = partial(api.sparse_attention_with_loss, implementation=implementation)
    if chunk_bytes is not None:
        attend = partial(attention_with_indexer_loss, row_chunk_bytes=chunk_bytes)
    problem = with_leaves.problem
    loss = FusedLoss(problem.indexer, scale, rows.append if read else None)
    given = (problem.selection, problem.geometry, loss, with_leaves.gate_logits)
    out, lse = attend(problem.q, problem.k, with_leaves.v, *given)
    assert not lse.requires_grad
    assert rows == []
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad.to(out.dtype))
    assert len(rows) == read
    assert not any(x.requires_grad for x in rows)
    measured = {"rows": rows[0]} if read else {}
    return {"out": out.detach(), **measured, **dict(zip(leaves, grads, strict=True))}


def assert_equal(got: Results, wanted: Results) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(got[name], want), name


def check(case: Fused, **options: Any) -> Results:
    """Check that the kernels' errors are at most twice the errors of the reference in the kernels' dtype, plus
    rounding. Errors are differences from a second run of the reference, in fp64. The largest difference counts for
    attention's results, and the norm of all differences for the indexer's results."""
    got = run(case, **options)
    exact = run(case, implementation="reference", dtype=torch.float64)
    same = run(case, implementation="reference")
    attended = [name for name in ("out", *ATTENDED) if name in exact]
    largest = max(1.0, *(exact[name].abs().max().item() for name in attended))
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        value, errors = got[name], [x[name].double() - want for x in (got, same)]
        if name in case.tensors:
            assert value.dtype == case.tensors[name].dtype, name
        if name in attended:
            error, of_reference = (x.abs().max() for x in errors)
            floor = 4 * torch.finfo(value.dtype).eps * largest
        else:
            error, of_reference = (x.norm() for x in errors)
            # Biases and beta are in fp32, from rounded inputs.
            in_full = name in case.tensors and value.dtype == torch.float32
            floor = (2 if in_full else 1) * TARGET_EPS * want.norm() + 1e-5
        message = f"{name}: {error} against {of_reference}, at most {want.abs().max()}"
        assert error <= 2 * of_reference + floor, message
    return got


def assert_attention_is_untouched(case: Fused, got: Results) -> None:
    """Check that attention has the same bits as the kernels without the loss."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.attended.items()}
    problem = case.problem
    given = (problem.selection, problem.geometry, leaves.get("gate_logits"))
    out, _ = api.sparse_attention(leaves["q"], leaves["k"], leaves["v"], *given, implementation="triton")
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad)
    wanted = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    assert_equal({name: got[name] for name in wanted}, wanted)
