"""Copy the tensors of a save while the next step computes.

A step reads the tensors of a checkpoint (weights, optimizer state, averages), but changes them only in its update. The
update must therefore wait until the tensors are copied:
- A separate stream copies GPU tensors to pinned memory, and the device waits for this stream before the update.
- A thread copies tensors in host memory, and the host waits for this thread before the update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gsa_train.checkpoint.host_memory import HostMemory

Group = list[tuple[Any, torch.Tensor]]
"""The tensors of one file, each with torch's description of it."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""(copy, source)"""


class Copies:
    """Makes the copies of one save. The constructor starts them."""

    def __init__(self, of_gpu: Sequence[Pair], of_host: Sequence[Pair], thread: ThreadPoolExecutor) -> None:
        self._sources: list[torch.Tensor] = [source for _, source in (*of_gpu, *of_host)]
        """References to the source tensors. They are kept until the update, even if the optimizer is freed."""
        self._filled = _copy_on_gpu(of_gpu) if of_gpu else None
        self._in_thread: Future[None] | None = thread.submit(_copy_all, of_host) if of_host else None
        self._waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events before and after the device's wait."""
        self._waited_seconds = 0.0

    def hold_update(self) -> None:
        """Make the update wait for the copies of this save.

        Device work that is queued after this call waits for the copies of tensors on the device. The call itself waits
        for the copies of tensors in host memory. If a copy fails, only `wait` raises the error.
        """
        if not self._sources:
            return
        if self._filled is not None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            torch.cuda.current_stream().wait_event(self._filled)
            after.record()
            self._waits = before, after
        began = time.perf_counter()
        if self._in_thread is not None:
            self._in_thread.exception()  # only waits
        self._waited_seconds = time.perf_counter() - began
        # If a source is freed here, its memory is reused only after the wait, in the same stream.
        self._sources = []

    def wait(self) -> None:
        """Wait until the copies are filled. Any thread may call this.

        Raises:
            Exception: the error that kept a copy from being filled.
        """
        if self._filled is not None:
            self._filled.synchronize()
        if self._in_thread is not None:
            self._in_thread.result()

    def held_seconds(self) -> float:
        """Returns how long an update had to wait. Call it once the copies are filled."""
        waits, self._waits = self._waits, None
        if waits is not None:
            before, after = waits
            after.synchronize()
            self._waited_seconds += before.elapsed_time(after) / 1000
        return self._waited_seconds


def begin_copies(groups: Sequence[Group], memory: HostMemory, thread: ThreadPoolExecutor) -> Copies:
    """Start to copy the tensors in these lists, and replace them in the lists by their copies.

    No tensor may change before `Copies.hold_update` or `Copies.wait` has returned.

    Raises:
        RuntimeError, MemoryError: there is no memory for the copies.
    """
    of_gpu: list[Pair] = []
    of_host: list[Pair] = []
    pinned = iter(memory.pinned_like([tensor for group in groups for _, tensor in group if tensor.is_cuda]))
    for group in groups:
        for number, (item, tensor) in enumerate(group):
            copy = next(pinned) if tensor.is_cuda else torch.empty(tensor.shape, dtype=tensor.dtype)
            (of_gpu if tensor.is_cuda else of_host).append((copy, tensor.detach()))
            group[number] = (item, copy)
    return Copies(of_gpu, of_host, thread)


def _copy_on_gpu(pairs: Sequence[Pair]) -> torch.cuda.Event:
    """Queue the copies on a new stream. They begin after the work that the current stream has queued so far. Returns an
    event that is recorded after the last copy."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy, source in pairs:
            copy.copy_(source, non_blocking=True)
    filled = torch.cuda.Event(blocking=True)  # a thread that waits for it uses no CPU
    filled.record(stream)
    return filled


def _copy_all(pairs: Sequence[Pair]) -> None:
    with torch.no_grad():
        for copy, source in pairs:
            copy.copy_(source)
