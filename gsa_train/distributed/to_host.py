"""Numbers between host and device that make neither wait for the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ToHost:
    """A tensor on its way to the host, which reads it later; the device goes on meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """On a GPU nothing but the copy is queued; of a CPU's tensor this is no copy."""
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> torch.Tensor:
        """Waits until the device has come to the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


def to_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """fp64 [len(numbers)]. From memory that is not pinned a GPU's copy would wait for all that is queued."""
    tensor = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
