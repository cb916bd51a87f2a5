"""Tests that one selection needs few torch operations and launches, and that the host never waits for the device.
Tensors are on torch's device "meta". They have no data, so code that reads a value on the host raises an error."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gsa_kernels import api
from gsa_kernels.devices import interpreted
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, Geometry, Indexer

pytestmark = pytest.mark.skipif(not interpreted(), reason="replaces the interpreter")

LENGTH, RULE = 32768, BudgetRule(2048, 256, 4096)


class Operations(TorchDispatchMode):
    """Counts torch's operations except views, which never reach a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.calculated = self.on_host = 0
        """Operations other than allocations, and those among them on tensors of the host."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.count += not operation.is_view
        if not operation.is_view and "empty" not in str(operation) and "detach" not in str(operation):
            self.calculated += 1
            self.on_host += isinstance(result, torch.Tensor) and result.device.type == "cpu"
        return result


@pytest.fixture
def launched(monkeypatch):
    """Record the names of kernels in place of running them."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *_, **__: names.append(kernel.fn.__name__))
    return names


@pytest.mark.parametrize(
    ("candidates_from", "operations", "launches"),
    [(None, 4, 14), (8192, 47, 40)],
    ids=["all scores", "candidates"],
)
def test_counts_of_a_selection(candidates_from, operations, launches, launched):
    ema, of_all = torch.ones((), device="meta"), indexer(LENGTH)
    with Operations() as counted:
        select_keys(of_all, RULE, ema, candidates_from=candidates_from)
    assert (counted.count, len(launched)) == (operations, launches)


def indexer(length: int) -> Indexer:
    return Indexer(empty(1, length, 4, 64), empty(1, length, 64), empty(1, length, 4))


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


@pytest.mark.parametrize(
    ("length", "heads", "budget", "operations", "launches"),
    [(8192, (12, 4, 64), BudgetRule(512, 64, 1024), 7, 15), (32768, (16, 4, 128), RULE, 8, 100)],
    ids=["8K, 94M shape", "32K, 1.7B shape"],
)
def test_counts_of_a_layer(length, heads, budget, operations, launches, launched):
    """For selection, attention and loss, the host must only launch kernels. With other work in between, a short kernel
    would end before the host launches the next kernel."""
    count, kv_count, size = heads
    geometry = Geometry(local_window=64)
    q, gate = (empty(1, length, count, size) for _ in range(2))
    k, v = (empty(1, length, kv_count, size) for _ in range(2))
    of_all, implementation = indexer(length), {"implementation": "triton"}
    with Operations() as counted:
        ema = torch.ones((), device="meta")
        selection = api.select(of_all, budget, ema, geometry, kernel="masked", **implementation)
        out, lse = api.sparse_attention(q, k, v, selection, geometry, gate, **implementation)
        loss, _ = api.indexer_loss(of_all, q, k, lse, selection, geometry, **implementation)
        torch.autograd.backward([out, loss], [torch.empty_like(out), torch.empty_like(loss)])
    assert counted.on_host == 0
    assert (counted.calculated, len(launched)) == (operations, launches)
