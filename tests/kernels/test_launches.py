"""Tests on which device the kernels of `gsa_kernels.api` run, and that second derivatives raise an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import api_cases
from api_cases import CASES, Case, Problem, problem, select
from triton.runtime.interpreter import GridExecutor

from gsa_kernels import api, operations_triton
from gsa_kernels.attention import op as attention_op
from gsa_kernels.devices import interpreted
from gsa_kernels.selection import lists_op, op
from gsa_kernels.types import Selection


@pytest.mark.skipif(not interpreted(), reason="of the interpreter")
@pytest.mark.parametrize("name", ["packed mask, a share of the rows", "key lists, half of the rows", "dense"])
def test_kernels_are_launched_on_the_device_of_their_tensors(name, monkeypatch):
    """The current device may be another GPU. In the backward pass autograd sets the current device."""
    within: list[str] = []

    @contextmanager
    def enter(_tensor: torch.Tensor, name: str = "") -> Iterator[None]:
        within.append(name)
        yield
        within.pop()

    def launch(self: GridExecutor, *given: Any, **named: Any) -> Any:
        assert within, self.fn.__name__
        return run(self, *given, **named)

    run = GridExecutor.__call__
    for module in (operations_triton, attention_op, op, lists_op):
        monkeypatch.setattr(module, "launching_on", enter)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    given = problem(CASES[name])
    out, _, selection = forward(CASES[name], given)
    assert out.isfinite().all()
    if selection is not None and selection.packed_mask is not None:
        api.sampled_lse(given.q, given.k, selection.packed_mask, implementation="triton")


def forward(case: Case, given: Problem) -> tuple[torch.Tensor, torch.Tensor, Selection | None]:
    """Return output, loss of all rows, and selection by Triton."""
    q, k, geometry, by = given.q, given.k, given.geometry, {"implementation": "triton"}
    selection = None if case.dense else select(case, given, "triton")
    out, lse = api.sparse_attention(q, k, given.v, selection, geometry, given.gate_logits, **by)  # type: ignore[arg-type]
    loss, _ = api.indexer_loss(given.indexer, q, k, lse, selection, geometry, **by)  # type: ignore[arg-type]
    return out, loss, selection


def one_step(case: Case) -> list[torch.Tensor | None]:
    given = problem(case)
    out, loss, _ = forward(case, given)
    leaves = list(given.leaves().values())
    return [out, loss, *torch.autograd.grad(out.float().square().sum() + loss, leaves, allow_unused=True)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["packed mask, a share of the rows", "key lists, documents, relu", "dense"])
def test_tensors_of_the_second_gpu_give_the_bits_of_the_first(name, monkeypatch):
    """The first GPU is the current device."""
    steps = []
    for device in ("cuda:0", "cuda:1"):
        monkeypatch.setattr(api_cases, "DEVICE", device)
        steps.append(one_step(CASES[name]))
    for first, second in zip(*steps, strict=True):
        if first is None:
            assert second is None
            continue
        assert second.device == torch.device("cuda:1")
        assert torch.equal(first, second.to("cuda:0"))


@pytest.mark.parametrize("name", ["packed mask, a share of the rows", "key lists, half of the rows", "dense"])
def test_no_second_derivatives(name: str) -> None:
    """Second derivatives would be wrong, because the kernels record no graph."""
    given = problem(CASES[name])
    out, loss, _ = forward(CASES[name], given)
    for result, leaf in ((out.sum(), given.q), (loss, given.indexer.queries)):
        with pytest.raises(ValueError, match="create_graph is True"):
            torch.autograd.grad(result, leaf, create_graph=True)
