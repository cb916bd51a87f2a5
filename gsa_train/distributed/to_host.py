"""Copy numbers between host and device asynchronously."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ToHost:
    """Copies a tensor to the host asynchronously. `read` waits for the copy and returns it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Queue the copy on a GPU. A CPU tensor is not copied."""
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


def to_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Returns fp64 [len(numbers)]. A GPU copies from pinned memory, because a pageable copy would wait for all queued
    work."""
    tensor = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
