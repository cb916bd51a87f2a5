"""Allocate pinned host memory, from which a save writes while training continues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import torch

from gsa_kernels.limits import next_power_of_2

ALIGNMENT = 512
"""Alignment in bytes, as for torch's tensors on devices."""
MOST_BLOCKS = 64
RESERVED_BLOCK_BYTES = 1 << 28
"""Smallest block that `reserve` pins before a save. The CUDA driver is locked while a block is pinned."""
PAUSE_OVER_BLOCK = 4.0
"""Pause after pinning a block, as a multiple of the time that the pinning took. Pinning locks the CUDA driver, so
without pauses a run's first step could not load its kernels until the last block is pinned."""


class HostMemory:
    """Keeps pinned memory between saves, because pinning takes much longer than copying. A thread allocates the memory
    before the first save."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._places: list[tuple[int, int]] = []
        self._thread = ThreadPoolExecutor(1, "checkpoint-memory")
        self._reserving: Future[None] | None = None
        self._is_awaited = Event()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Begin to pin memory for tensors whose sizes in bytes are approximately `sizes`.

        A thread pins one block after another, and pauses after each block. `pinned_like` ends these pauses, and waits
        until all blocks are pinned.
        """
        self._end_reserving()
        self._is_awaited.clear()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._reserving = self._thread.submit(self._reserve, list(sizes), device)

    def pinned_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns pinned tensors of these shapes and dtypes. The next call reuses their memory.

        Each tensor has its own storage, because `torch.save` writes whole storages.

        Raises:
            RuntimeError: there is no memory for them.
        """
        self._end_reserving()
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if sizes != self._sizes:
            self._places, more = place(sizes, [block.numel() for block in self._blocks])
            self._blocks += [_pinned(size) for size in more]
            self._sizes = sizes
        found = []
        for tensor, size, (block, start) in zip(tensors, sizes, self._places, strict=True):
            memory = torch.from_numpy(self._blocks[block].numpy()[start : start + size])
            found.append(memory.view(tensor.dtype).view(tensor.shape))
        return found

    def release(self) -> None:
        self._end_reserving()
        self._blocks, self._sizes = [], []

    def close(self) -> None:
        self._is_awaited.set()
        self._thread.shutdown(wait=True)

    def _end_reserving(self) -> None:
        reserving, self._reserving = self._reserving, None
        self._is_awaited.set()
        if reserving is not None:
            reserving.result()

    def _reserve(self, sizes: Sequence[int], device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread begins on the first device
        length = next_power_of_2(max([RESERVED_BLOCK_BYTES, *map(_rounded, sizes)]))
        _, left, _ = _first_fit(sizes, [block.numel() for block in self._blocks])
        _, _, filled = _first_fit([sizes[index] for index in left], [length] * len(left))
        for _ in filter(None, filled):
            began = time.monotonic()
            try:
                self._blocks.append(_pinned(length))
            except RuntimeError:  # the save that needs the memory reports it
                return
            self._is_awaited.wait(PAUSE_OVER_BLOCK * (time.monotonic() - began))


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def place(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns (block, offset) for each size in bytes, and the lengths of further blocks to allocate."""
    places, left, _ = _first_fit(sizes, blocks)
    more, places_of_left = pack([sizes[index] for index in left])
    for index, (block, start) in zip(left, places_of_left, strict=True):
        places[index] = (len(blocks) + block, start)
    return places, more


def _first_fit(
    sizes: Sequence[int], blocks: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Place tensors of `sizes` bytes into blocks of `blocks` bytes, the largest tensor first.

    Returns (block, offset) for each tensor, the indices of the tensors that fit into no block, and the number of bytes
    used in each block.
    """
    places, filled = [(0, 0)] * len(sizes), [0] * len(blocks)
    left = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = _rounded(sizes[index])
        fitting = (at for at, used in enumerate(filled) if used + size <= blocks[at])
        block = next(fitting, None)
        if block is None:
            left.append(index)
        else:
            places[index] = (block, filled[block])
            filled[block] += size
    return places, left, filled


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the sizes in bytes of a few pinned blocks, and (block, offset) of each tensor. torch rounds pinned memory
    up to a power of two. Blocks are therefore filled up to a power of two: the one that wastes least."""
    if not sizes:
        return [], []
    rounded = [_rounded(size) for size in sizes]
    total = sum(rounded)
    longest, all_in_one = next_power_of_2(max(rounded)).bit_length(), next_power_of_2(total).bit_length()
    lengths = [1 << (bits - 1) for bits in range(longest, all_in_one + 1)]
    tried = [_first_fit(sizes, [length] * len(sizes)) for length in lengths if total <= MOST_BLOCKS * length]
    packed = [([next_power_of_2(used) for used in filled if used], places) for places, _, filled in tried]
    return min(packed, key=lambda blocks_and_places: sum(blocks_and_places[0]))


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
