"""Compiles kernels for GPUs that need not be present, and prints the faults of the compiled kernels as JSON.

The faults are wrong sums and too much shared memory. The script is a separate process, because Triton interprets all
kernels in the tests' own process.
"""

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

from gsa_kernels.attention import triton_gathered_backward
from gsa_kernels.attention.inputs import AttentionInputs, GradientInputs
from gsa_kernels.attention.triton_backward_keys import backward_keys
from gsa_kernels.attention.triton_forward import attention_forward
from gsa_kernels.attention.triton_gathered_forward import gathered_forward
from gsa_kernels.hopper.miscompile_guard import wrong_sums
from gsa_kernels.hopper.triton_backward_target import backward_queries_with_target
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.loss.triton_launch import BY_HEAD, STACKED, Blocks
from gsa_kernels.types import Indexer

HEADS, ROWS, SIZE = 2, 32, 16
SHARED_BYTES = 227 * 1024
"""Largest shared memory of a program on Hopper (CUDA C++ Programming Guide, Compute Capabilities)."""


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


class Driver:
    """Implements what Triton needs from a device to compile for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def found_in(capability: int, launches: Callable[[], object]) -> list[str]:
    """Compile these kernels for a compute capability such as 90; return wrong sums and excess memory."""
    compiled = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Driver(capability))  # type: ignore[arg-type]
    with mock.patch.object(JITFunction, "run", compile_only):
        launches()
    assert compiled
    found = [f"{kernel.name}: {what}" for kernel in compiled for what in wrong_sums(kernel.asm["ttgir"])]
    sizes = {kernel.name: kernel.metadata.shared for kernel in compiled}
    return found + [f"{name}: {size} bytes" for name, size in sizes.items() if size > SHARED_BYTES]


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


def masked_attention_of_256(group: int) -> None:
    q, k, gate, of_rows, words = _attended(group)
    attention_forward(AttentionInputs(q, k, k, gate), words, None)
    backward_keys(GradientInputs(q, q, k, k, of_rows, of_rows), words, None)


def gathered_attention_of_256(group: int, segments: int) -> None:
    q, k, gate, of_rows, _ = _attended(group)
    tiles = q.shape[1] // 32
    starts = torch.zeros(1, tiles, dtype=torch.int64)
    counts = torch.ones(1, tiles, dtype=torch.int32)
    lists = KeyLists(counts[0], counts[0], starts, counts, q.shape[1], 64, host_counts=counts)
    inputs = AttentionInputs(q, k, k, gate)
    gathered_forward(inputs, lists)
    with mock.patch.object(triton_gathered_backward, "count_segments", return_value=segments):
        triton_gathered_backward.gathered_backward(q, inputs, q, of_rows, lists, 2**20)


def _attended(group: int) -> tuple[torch.Tensor, ...]:
    length, size = 128, 256
    q = torch.zeros(1, length, group, size, dtype=torch.bfloat16)
    words = torch.full((1, length, length // 32), -1, dtype=torch.int32)
    return q, q[:, :, :1].contiguous(), q[:, :, None].contiguous(), torch.zeros(1, group, length), words


def main() -> int:
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # the kernels check for TMA
    bf16 = torch.bfloat16
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "rows, heads, rows": (90, lambda: sum_of_heads(32, 8)),
        "heads, rows": (90, lambda: sum_of_heads(64, 8)),
        "Hopper, 2 heads": (90, lambda: indexer_loss(2, bf16, STACKED)),
        "Hopper, 4 heads": (90, lambda: indexer_loss(4, bf16, STACKED)),
        "Hopper, target, heads of 64": (90, lambda: loss_target(64, documents=True)),
        "Hopper, target, heads of 128": (90, lambda: loss_target(128, documents=False)),
        "Hopper, target, heads of 256": (90, lambda: loss_target(256, documents=False)),
        "Hopper, masked attention, heads of 256": (90, lambda: masked_attention_of_256(8)),
        "Hopper, attention over lists, heads of 256": (90, lambda: gathered_attention_of_256(12, 1)),
        "Hopper, lists in segments, heads of 256": (90, lambda: gathered_attention_of_256(12, 2)),
        "Blackwell, 4 heads": (100, lambda: indexer_loss(4, bf16, BY_HEAD)),
    }
    json.dump({name: found_in(*case) for name, case in cases.items()}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
