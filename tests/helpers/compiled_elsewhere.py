"""Compiles kernels for GPUs that need not be there: as a script it prints, as JSON, what of each Triton would sum
wrongly. In a process of its own, for the tests' kernels are those of the interpreter."""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gsa_kernels.attention.inputs import GradientInputs
from gsa_kernels.hopper.miscompile_guard import wrong_sums
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.indexer_loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.indexer_loss.triton_launch import BY_HEAD, STACKED, Blocks
from gsa_kernels.types import Indexer

HEADS, ROWS, SIZE = 2, 32, 16


@triton.jit
def sum_of_heads_kernel(queries, keys, out, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """sum_h <q_h[row], k[key]>: of the rows of the product, eight in turn are of one head."""
    d = tl.arange(0, 16)
    row, key = tl.arange(0, HEADS * ROWS), tl.arange(0, KEYS)
    head, part = row // 8 % HEADS, row // (8 * HEADS) * 8 + row % 8
    q = tl.load(queries + (head * ROWS + part)[:, None] * 16 + d[None, :])
    k = tl.load(keys + key[:, None] * 16 + d[None, :])
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    of_heads = tl.permute(tl.reshape(product, [ROWS // 8, HEADS, 8, KEYS]), [1, 0, 2, 3])
    total = tl.sum(tl.reshape(of_heads, [HEADS, ROWS, KEYS]), 0)
    tl.store(out + tl.arange(0, ROWS)[:, None] * KEYS + key[None, :], total)


class Driver:
    """What Triton asks of a device to compile for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def found_in(capability: int, launches: Callable[[], object]) -> list[str]:
    """Wrong sums in the kernels of these launches, compiled for a compute capability such as 90."""
    compiled = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Driver(capability))  # type: ignore[arg-type]
    with mock.patch.object(JITFunction, "run", compile_only):
        launches()
    assert compiled
    return [f"{kernel.name}: {what}" for kernel in compiled for what in wrong_sums(kernel.asm["ttgir"])]


def sum_of_heads(keys: int, warps: int) -> None:
    operands = torch.zeros(HEADS, ROWS, SIZE), torch.zeros(keys, SIZE), torch.zeros(ROWS, keys)
    sum_of_heads_kernel[(1,)](*operands, HEADS, ROWS, keys, num_warps=warps)


def indexer_loss(heads: int, dtype: torch.dtype, blocks: Blocks) -> None:
    length, dim = 128, 64
    inputs = [torch.zeros(1, length, heads, dim), torch.zeros(1, length, dim), torch.zeros(1, length, heads)]
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    biases = [torch.zeros(heads, requires_grad=True) for _ in range(2)]
    packed_mask = torch.full((1, length, length // 32), -1, dtype=torch.int32)
    target = Target(lambda rows: torch.ones(1, rows.count, length))
    masked_indexer_loss(Indexer(*leaves, *biases), target, Attended(packed_mask), blocks=blocks)


def loss_target(head_size: int, documents: bool) -> None:
    length, heads = 128, 4
    q = torch.zeros(1, length, heads, head_size, dtype=torch.bfloat16)
    k = torch.zeros(1, length, 1, head_size, dtype=torch.bfloat16)
    of_rows = torch.zeros(1, heads, length)
    backward_queries_with_target(
        GradientInputs(q, q, k, k, of_rows, of_rows),
        torch.full((1, length, length // 32), -1, dtype=torch.int32),
        torch.zeros(1, length, dtype=torch.int32) if documents else None,
        q,
        range(length),
    )


def main() -> int:
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # the copy engine is asked for
    bf16 = torch.bfloat16
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "rows, heads, rows": (90, lambda: sum_of_heads(32, 8)),
        "heads, rows": (90, lambda: sum_of_heads(64, 8)),
        "Hopper, 2 heads": (90, lambda: indexer_loss(2, bf16, STACKED)),
        "Hopper, 4 heads": (90, lambda: indexer_loss(4, bf16, STACKED)),
        "Hopper, target, heads of 64": (90, lambda: loss_target(64, documents=True)),
        "Hopper, target, heads of 128": (90, lambda: loss_target(128, documents=False)),
        "Blackwell, 4 heads": (100, lambda: indexer_loss(4, bf16, BY_HEAD)),
    }
    json.dump({name: found_in(*case) for name, case in cases.items()}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
