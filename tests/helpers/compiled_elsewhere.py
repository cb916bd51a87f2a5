"""Compiles kernels for GPUs that need not be present, and prints the faults of the compiled kernels as JSON.

This script looks for wrong sums (gsa_kernels/miscompile_guard.py), too much shared memory, and compiler errors.
Tests run it as a separate process, because Triton interprets all kernels in the tests' own process.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from compile_kernels import launch_all
from compiled_for import compile_for

from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.types import Indexer

HEADS, ROWS, SIZE = 2, 32, 16


@triton.jit
def sum_of_heads_kernel(queries, keys, out, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Compute sum_h <q_h[row], k[key]>, with eight successive rows of the product from one head."""
    d = tl.arange(0, 16)
    row, key = tl.arange(0, HEADS * ROWS), tl.arange(0, KEYS)
    head, part = row // 8 % HEADS, row // (8 * HEADS) * 8 + row % 8
    q = tl.load(queries + (head * ROWS + part)[:, None] * 16 + d[None, :])
    k = tl.load(keys + key[:, None] * 16 + d[None, :])
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    of_heads = tl.permute(tl.reshape(product, [ROWS // 8, HEADS, 8, KEYS]), [1, 0, 2, 3])
    total = tl.sum(tl.reshape(of_heads, [HEADS, ROWS, KEYS]), 0)
    tl.store(out + tl.arange(0, ROWS)[:, None] * KEYS + key[None, :], total)


def sum_of_heads(keys: int, warps: int) -> None:
    operands = torch.zeros(HEADS, ROWS, SIZE), torch.zeros(keys, SIZE), torch.zeros(ROWS, keys)
    sum_of_heads_kernel[(1,)](*operands, HEADS, ROWS, keys, num_warps=warps)


def indexer_loss() -> None:
    length, heads, dim = 128, 4, 64
    inputs = [torch.zeros(1, length, heads, dim), torch.zeros(1, length, dim), torch.zeros(1, length, heads)]
    leaves = [x.bfloat16().requires_grad_() for x in inputs]
    biases = [torch.zeros(heads, requires_grad=True) for _ in range(2)]
    packed_mask = torch.full((1, length, length // 32), -1, dtype=torch.int32)
    target = Target(lambda rows: torch.ones(1, rows.count, length))
    triton_indexer_loss(Indexer(*leaves, *biases), target, Attended(packed_mask))


def main() -> int:
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "rows, heads, rows": (90, lambda: sum_of_heads(32, 8)),
        "heads, rows": (90, lambda: sum_of_heads(64, 8)),
        "Blackwell, 4 heads": (100, indexer_loss),
    }
    for capability in (80, 89, 90):
        for config in ("paper_gsa_1.7b", "gsa_1.7b_128k"):
            cases[f"sm_{capability}, {config}"] = (capability, partial(launch_all, config))
    found = {
        name: [f"{kernel.name}: {fault}" for kernel in compile_for(*case) for fault in kernel.faults]
        for name, case in cases.items()
    }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
