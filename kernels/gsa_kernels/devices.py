"""Where Triton's kernels run: on CUDA devices, or in Triton's interpreter for tests."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def on_hopper(device: torch.device) -> bool:
    """Whether products have the layout of Hopper's, compute capability 9; the interpreter knows no layouts."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def can_chain(tensor: torch.Tensor) -> bool:
    """Programmatic dependent launch: a kernel is in place before the one in front of it ends. Hopper has it."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9


def launching_on(tensor: torch.Tensor, name: str = "q_idx") -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's.

    Raises:
        ValueError: no kernel can run where the tensor is; `name` is what the message calls it.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not interpreted():
        raise ValueError(
            f"{name} is on {tensor.device}; pass CUDA tensors (or set TRITON_INTERPRET=1 to test)"
        )
    return nullcontext()
