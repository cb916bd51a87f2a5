"""Copies in host memory, from which a save writes while the training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALIGNMENT = 512
"""Bytes; as torch aligns tensors on devices."""
MOST_BLOCKS = 64


class HostMemory:
    """Those of GPU tensors are pinned, and kept from save to save, because pinning takes longer than copying."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._places: list[tuple[int, int]] = []

    def copy(self, groups: Sequence[list[tuple[Any, torch.Tensor]]]) -> None:
        """Replace the tensors in these lists, in place.

        Raises:
            RuntimeError: there is no memory for them.
        """
        on_gpu = [tensor for group in groups for _, tensor in group if tensor.is_cuda]
        pinned = iter(self.pinned_like(on_gpu))
        for group in groups:
            # One by one: of tensors in host memory megatron-core's plan may have made copies of its own.
            for number, (item, tensor) in enumerate(group):
                if tensor.is_cuda:
                    group[number] = (item, next(pinned).copy_(tensor.detach(), non_blocking=True))
                else:
                    group[number] = (item, tensor.detach().clone())
        if on_gpu:
            torch.cuda.synchronize()

    def pinned_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these shapes and types, where those of the last call were. Each has a storage of its own, for that
        is what `torch.save` writes."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if sizes != self._sizes:
            self.release()
            blocks, self._places = pack(sizes)
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in blocks]
            self._sizes = sizes
        found = []
        for tensor, size, (block, start) in zip(tensors, sizes, self._places, strict=True):
            memory = torch.from_numpy(self._blocks[block].numpy()[start : start + size])
            found.append(memory.view(tensor.dtype).view(tensor.shape))
        return found

    def release(self) -> None:
        self._blocks, self._sizes = [], []


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of a few blocks, and block and offset for each size, in bytes.

    torch rounds pinned memory up to a power of two, so blocks are such, and of the length that wastes least.
    """
    if not sizes:
        return [], []
    rounded = [-(-max(size, 1) // ALIGNMENT) * ALIGNMENT for size in sizes]
    total = sum(rounded)
    longest, all_in_one = _power_of_two(max(rounded)).bit_length(), _power_of_two(total).bit_length()
    lengths = [1 << (bits - 1) for bits in range(longest, all_in_one + 1)]
    tried = [_first_fit(rounded, length) for length in lengths if total <= MOST_BLOCKS * length]
    return min(tried, key=lambda blocks_and_places: sum(blocks_and_places[0]))


def _first_fit(sizes: Sequence[int], length: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Into blocks of at most `length`, the largest first."""
    filled: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        block = next((at for at, used in enumerate(filled) if used + sizes[index] <= length), len(filled))
        if block == len(filled):
            filled.append(0)
        places[index] = (block, filled[block])
        filled[block] += sizes[index]
    return [_power_of_two(used) for used in filled], places


def _power_of_two(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()
