"""Set CUDA_DEVICE_MAX_CONNECTIONS, the number of work queues between the host and a CUDA device (CUDA's default is 8).

With tensor parallelism, megatron-core starts a collective, and then a matrix product that hides it by running at the
same time. A single work queue makes sure that the GPU schedules the collective first (see tensor_parallel/layers.py in
megatron-core). Megatron-LM therefore refuses more than one queue (see its training/arguments.py), with two exceptions:
Blackwell and later GPUs do not need a single queue, and FSDP needs several queues to all-gather each layer's weights.

CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when the program first asks for devices, as in `torch.cuda.is_available()`.
Launchers therefore set the variable before they import torch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, MutableMapping

from gsa_train.config import ParallelConfig

logger = logging.getLogger(__name__)

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""Major compute capability."""


def prepare_connections(
    layouts: Iterable[ParallelConfig], environment: MutableMapping[str, str], capability: int | None
) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 1 if it is unset and a layout needs this. Call before importing torch.

    Args:
        layouts: all layouts of this process, because CUDA reads the variable once.
    """
    if capability is None or capability >= BLACKWELL or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    tensor = max(
        (each.tensor for each in layouts if each.strategy == "megatron" or each.zero_stage < 3), default=1
    )
    if tensor == 1:
        return
    is_main, found = environment.get("RANK", "0") == "0", environment.get(VARIABLE)
    if found is None:
        environment[VARIABLE] = "1"
        if is_main:
            logger.info("%s=1, for the overlap of tensor parallelism (parallel.tensor=%d)", VARIABLE, tensor)
    elif found != "1" and is_main:
        logger.warning(
            "%s=%s: with parallel.tensor=%d products may be scheduled before the collectives that they should hide, "
            "which costs time but changes no number; unset it, or set it to 1",
            VARIABLE,
            found,
            tensor,
        )


def compute_capability() -> int | None:
    """Returns the major compute capability of the first NVIDIA device, or None without a device. Asks NVML, because
    CUDA must not start."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(
        0, ctypes.byref(device)
    ) or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlShutdown()
    return None if failed else major.value
