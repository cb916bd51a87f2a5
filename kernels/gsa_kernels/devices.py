"""Decides where Triton's kernels run: on CUDA devices, or in Triton's interpreter for tests."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton

from gsa_kernels.limits import HOPPER_SHARED_BYTES


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@cache
def properties(device: torch.device) -> Any:
    """Return torch's properties of a CUDA device. They are kept, because torch takes 10 us to look them up."""
    return torch.cuda.get_device_properties(device)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have; Hopper's outside CUDA."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return int(properties(device).shared_memory_per_block_optin)


def can_chain(tensor: torch.Tensor) -> bool:
    """Return whether the device can start a kernel before the previous kernel ends (programmatic dependent launch)."""
    return tensor.is_cuda and properties(tensor.device).major >= 9


def launching_on(tensor: torch.Tensor, name: str = "q_idx") -> AbstractContextManager[object]:
    """Make the tensor's device current, because Triton launches on the current device.

    Raises:
        ValueError: no kernel can run on the tensor's device; the message calls the tensor `name`.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not interpreted():
        raise ValueError(
            f"{name} is on {tensor.device}; pass CUDA tensors (or set TRITON_INTERPRET=1 to test)"
        )
    return nullcontext()
