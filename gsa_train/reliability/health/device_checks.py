"""Find faults of one device: wrong matrix products and wrong memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gsa_train.reliability.health.products import make_problem, wrong_products

GPU_SIZES = {torch.bfloat16: (8192, 4096, 256), torch.float32: (4096, 2048, 256)}
"""Size, inner size and length of the signs: large enough for all multiprocessors, less than 1 GB."""
CPU_SIZES = {torch.float32: (256, 128, 64)}
MEMORY_SHARE = 0.8
"""Share of the free memory that is checked."""
BLOCK_BYTES = 1 << 30
CPU_MEMORY_BYTES = 1 << 22
PATTERNS = (0x55, 0xAA)
"""Bytes that set every bit once to 0 and once to 1, with opposite neighbours."""


def faults_of_device(device: torch.device, seconds: float) -> list[str]:
    """
    Args:
        seconds: duration of the matrix products on a GPU; a CPU computes two of each type.
    """
    return [*_product_faults(device, seconds), *_memory_faults(device)]


def _product_faults(device: torch.device, seconds: float) -> Iterator[str]:
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    for dtype, size in sizes.items():
        problem = make_problem(*size, dtype, device)
        share = seconds / len(sizes) if device.type == "cuda" else 0.0
        wrong, count = wrong_products(problem, share, least=2)
        if wrong:
            name = str(dtype).removeprefix("torch.")
            yield f"{wrong} wrong elements in {count} products of {name} matrices of {size[0]} x {size[0]}"


def _memory_faults(device: torch.device) -> Iterator[str]:
    """Write a pattern to free memory, then compare all of it."""
    if device.type == "cuda":
        free = int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
        sizes = [BLOCK_BYTES] * (free // BLOCK_BYTES)
    else:
        sizes = [CPU_MEMORY_BYTES]
    blocks: list[torch.Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):  # Another process has taken some memory meanwhile.
        for size in sizes:
            blocks.append(torch.empty(size // 8, dtype=torch.int64, device=device))
    for pattern in PATTERNS:
        word = int.from_bytes(bytes([pattern]) * 8, "little", signed=True)
        for number, block in enumerate(blocks):
            write(block, word ^ number)  # differs by block, which finds wrong addresses
        parts = ((part, word ^ number) for number, block in enumerate(blocks) for part in block.chunk(16))
        wrong = [(part != written).sum() for part, written in parts]
        count = int(sum(wrong))
        if count:
            size = sum(block.nbytes for block in blocks) >> 20
            yield f"{count} wrong words of memory with the pattern {pattern:#x}, in {size} MiB"
    del blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # The run later reports the peak of its training.


def write(block: torch.Tensor, word: int) -> None:
    block.fill_(word)
