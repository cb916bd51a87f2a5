"""Compiles kernels for a GPU that need not be present. Launches are recorded and compiled, and no kernel runs."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import PTXASError
from triton.compiler import CompilationError
from triton.runtime.jit import JITFunction

from gsa_kernels import devices
from gsa_kernels.limits import MULTIPROCESSORS
from gsa_kernels.miscompile_guard import wrong_sums

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Largest shared memory of a program by compute capability (CUDA C++ Programming Guide, Compute Capabilities)."""

_CUOBJDUMP = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"


class Driver:
    """Implements what Triton needs from a device to compile for it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton caches target and kernels by device, so each target needs a device of its own.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


ZEROS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class OnGpu(TorchFunctionMode):
    """Lets tensors in host memory pass for CUDA tensors. New tensors are zeros, because no kernel writes them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined] # a property
            return True
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == torch.Tensor.pin_memory:
            return args[0]
        if func == torch.Tensor.to:
            args = tuple(each for each in args if not isinstance(each, torch.device))
        kwargs.pop("pin_memory", None)
        kwargs.pop("device", None)
        return ZEROS.get(func, func)(*args, **kwargs)


@dataclass(frozen=True)
class Compiled:
    """Describes one kernel as compiled for one launch. Sizes are in bytes. A thread's stack holds spilled registers."""

    name: str
    faults: tuple[str, ...]
    """Reasons why the kernel cannot run."""
    shared: int = 0
    registers: int = 0
    stack: int = 0


def compile_for(capability: int, launches: Callable[[], object]) -> list[Compiled]:
    """Compile the kernels that `launches` would launch on a GPU of a compute capability such as 90."""
    found: dict[str, Compiled] = {}
    run, limit = JITFunction.run, SHARED_KIB[capability] * 1024

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{self.fn.__module__.removeprefix('gsa_kernels.')}.{self.__name__.strip('_')}"
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        except (CompilationError, PTXASError, RuntimeError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[-1]
            found[name + reason] = Compiled(name, (reason,))
        else:
            assert kernel.metadata.target.arch == capability
            if kernel.hash not in found:
                found[kernel.hash] = _describe(name, kernel, limit)

    properties = SimpleNamespace(
        major=capability // 10, multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=limit
    )
    cuda: dict[str, Any] = {
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
        "device": lambda device: nullcontext(),
        "Event": mock.MagicMock,
    }
    devices.properties.cache_clear()  # of the architecture before
    triton.runtime.driver.set_active(Driver(capability))  # type: ignore[arg-type]
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(JITFunction, "run", compile_only),
        OnGpu(),
    ):
        launches()
    assert found
    return list(found.values())


def _describe(name: str, kernel: Any, limit: int) -> Compiled:
    faults, shared = wrong_sums(kernel.asm["ttgir"]), kernel.metadata.shared
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory; the GPU has {limit}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr] # a fixed format
    return Compiled(name, tuple(faults), shared, registers, stack)
