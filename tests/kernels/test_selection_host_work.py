"""What the host does in one selection: operations of torch and launches are few, known, and never wait for the device.

The tensors have no data (device meta), and no kernel runs: whoever reads a value back gets an error of torch.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gsa_kernels.devices import interpreted
from gsa_kernels.selection.block_op import select_block_lists
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, Geometry, Indexer

pytestmark = pytest.mark.skipif(not interpreted(), reason="replaces the interpreter")

LENGTH, BLOCK, RULE = 32768, 32, BudgetRule(2048, 256, 4096)


class Operations(TorchDispatchMode):
    """Counts what torch does, but for views, which no device sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("way", "operations", "launches"), [("shared", 10, 5), ("all scores", 4, 14), ("candidates", 47, 40)]
)
def test_counts_of_a_selection(way, operations, launches, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    launched: list[str] = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *_, **__: launched.append(kernel.fn.__name__)
    )
    ema = torch.ones((), device="meta")
    each, shared = indexer(LENGTH), indexer(LENGTH // BLOCK)
    of_blocks = Geometry(selection_block=BLOCK, local_window=64)
    with Operations() as counted:
        if way == "shared":
            select_block_lists(shared, RULE, ema, of_blocks)
        else:
            select_keys(each, RULE, ema, candidates_from=8192 if way == "candidates" else None)
    assert (counted.count, len(launched)) == (operations, launches)


def indexer(rows: int) -> Indexer:
    return Indexer(
        torch.empty((1, rows, 4, 64), dtype=torch.bfloat16, device="meta", requires_grad=True),
        torch.empty((1, LENGTH, 64), dtype=torch.bfloat16, device="meta", requires_grad=True),
        torch.empty((1, rows, 4), dtype=torch.bfloat16, device="meta", requires_grad=True),
    )
