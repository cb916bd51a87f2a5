"""Compiles kernels for a GPU that need not be present. Launches are recorded and compiled, and no kernel runs."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

from gsa_kernels.hopper.miscompile_guard import wrong_sums

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Largest shared memory of a program by compute capability (CUDA C++ Programming Guide, Compute Capabilities)."""

MULTIPROCESSORS = 132
_CUOBJDUMP = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"


class Driver:
    """Implements what Triton needs from a device to compile for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class OnGpu(TorchFunctionMode):
    """Lets tensors in host memory pass for CUDA tensors. New tensors are zeros, because no kernel writes them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == torch.Tensor.pin_memory:
            return args[0]
        if func == torch.Tensor.to:
            args = tuple(each for each in args if not isinstance(each, torch.device))
        kwargs.pop("pin_memory", None)
        kwargs.pop("device", None)
        zeros = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
        zeros[torch.Tensor.new_empty] = torch.Tensor.new_zeros
        return zeros.get(func, func)(*args, **kwargs)


@dataclass(frozen=True)
class Compiled:
    """Describes one kernel as compiled for one launch."""

    name: str
    shared: int
    """Bytes of shared memory of a program."""
    registers: int
    stack: int
    """Bytes of a thread's stack, which holds spilled registers."""
    faults: list[str]
    """Reasons why the kernel cannot run; empty if it can."""


@contextmanager
def _as_if_on(capability: int, compile_only: Any) -> Iterator[None]:
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=SHARED_KIB[capability] * 1024
    )
    cuda = {
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
        "device": lambda device: nullcontext(),
        "Event": mock.MagicMock,
    }
    triton.runtime.driver.set_active(Driver(capability))  # type: ignore[arg-type]
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(JITFunction, "run", compile_only),
        OnGpu(),
    ):
        yield


def compile_for(capability: int, launches: Callable[[], object]) -> list[Compiled]:
    """Compile the kernels that `launches` would launch on a GPU of a compute capability such as 90."""
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__module__.removeprefix("gsa_kernels.") + "." + self.__name__.strip("_")
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        except (CompilationError, PTXASError, RuntimeError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()
            found[f"{name} {reason}"] = Compiled(name, 0, 0, 0, [reason[-1] if reason else repr(error)])
        else:
            if kernel.hash not in found:
                found[kernel.hash] = _describe(name, kernel, capability)

    with _as_if_on(capability, compile_only):
        launches()
    assert found
    return list(found.values())


def _describe(name: str, kernel: Any, capability: int) -> Compiled:
    faults = wrong_sums(kernel.asm["ttgir"])
    shared, limit = kernel.metadata.shared, SHARED_KIB[capability] * 1024
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory; the GPU has {limit}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    return Compiled(name, shared, numbers["REG"], numbers["STACK"], faults)
