"""Patch megatron-core so that it trains on CPUs over gloo. A run on GPUs never imports this file.

megatron-core hard-codes "cuda" in its schedules, optimizer, random-number tracker and checkpoints. The left column
lists what this module patches, the right column the code that uses it:

    torch.cuda.current_device()          used as `device=` everywhere
    device="cuda", Tensor.cuda()         schedules, optimizer, gradient clipping, checkpoints
    Tensor.type() == "torch.cuda..."     optimizer, gradient clipping
    pin_memory=True                      checkpoints
    ShardedTensor.init_data              loading different tensors on each rank (`init_fn` defaults to torch.empty)
    torch.cuda.synchronize()             pipeline sends, checkpoints
    torch.cuda.Stream(), current_stream  gradient buffers (with several optimizer instances, or in megatron-core 0.19)
    the CUDA generator                   the tensor-parallel random-number tracker, recomputation with dropout

Gloo's process groups (megatron-core makes about twenty) share one network device here. By default each group opens
its own device, whose thread wakes up a hundred times a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
"""Functions that megatron-core calls with `device` or `pin_memory`. Each is replaced separately, because a
TorchFunctionMode would slowly intercept every operation and every access to a shape."""


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes tensors so that "cuda" and pinned memory mean the CPU and its memory."""

    @wraps(make)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return call


def _named_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type` so that it returns the name of a tensor on "cuda"."""

    @wraps(type_of)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return call


class _NoStream:
    """Stands for a stream on CPUs, where everything runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> None:
        pass


def _shares_devices(gloo: Any) -> Any:
    """Returns a `ProcessGroupGloo` whose later groups reuse the network devices of the first, which torch chooses."""
    devices: list[Any] = []

    class SharedDevices(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            if devices:
                options = gloo._Options()
                options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
                super().__init__(store, rank, size, options)
            else:
                super().__init__(store, rank, size, timeout)
                devices.extend(self.options._devices)

    return SharedDevices


def _names_cuda(device: Any) -> bool:
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


@cache
def install() -> None:
    """Patch torch and megatron-core for this process, before any megatron object is made. A second call does nothing.

    Raises:
        RuntimeError: the process has a CUDA device.
    """
    if torch.cuda.is_available():
        raise RuntimeError("gsa_train.distributed.cpu_backend is for processes without a CUDA device")
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = _NoStream
    cuda.default_stream = cuda.current_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda *args, **kwargs: nullcontext()
    # Not torch.manual_seed, which stores a stack trace each time for devices initialized later.
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self
    tracker: Any = megatron_random
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # CPU and "CUDA" share one generator here, so megatron's warning that the CPU state changed is meaningless.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # `with torch.device(...)` recognizes functions by a list that torch makes at its first use. Make it before the
    # replacements, because it must contain torch's own functions, which they call. Otherwise transformers creates
    # models on the CPU instead of "meta", and they stay unfilled.
    _device_constructors()
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    sharded_tensor: Any = ShardedTensor
    sharded_tensor.init_data.__defaults__ = (torch.empty,)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    tensor.type = _named_as_on_cuda(tensor.type)
    c10d: Any = distributed_c10d
    c10d.ProcessGroupGloo = _shares_devices(c10d.ProcessGroupGloo)
