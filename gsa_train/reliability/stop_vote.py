"""Stop all ranks before the same step, even if only one rank receives the signal."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gsa_train.reliability.stop_signals import StopRequest

SLOW_SECONDS = 1.0
"""If calls of `ask` are further apart, the result is read at once. A hundred ranks answer in milliseconds."""


class StopVote:
    """Takes the maximum of all ranks' stop reasons by gloo all-reduces of two numbers.

    The result of an all-reduce is read at the next call of `ask`, so hosts do not wait for each other. If steps are
    slow, the result is read in the same call, because a stop at the next call would be a step too late. Each all-reduce
    also computes the longest time between two calls on any rank, so all ranks agree on whether steps are slow.
    """

    def __init__(self, request: StopRequest, timeout: timedelta) -> None:
        """Collective over all ranks."""
        self._request = request
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._open: list[tuple[dist.Work, torch.Tensor]] = []
        self._slow = True  # read the first result at once: a stop may be requested before the first step
        self._reason = 0
        self._last_asked = time.monotonic()

    def ask(self) -> int:
        """Returns 0 to continue, else the reason why all ranks stop here. Collective."""
        now = time.monotonic()
        numbers = torch.tensor([self._request.reason, now - self._last_asked], dtype=torch.float64)
        self._last_asked = now
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._open.append((work, numbers))
        if len(self._open) > 1:
            self._read()
        if self._slow:
            self._read()
        return self._reason

    def close(self) -> None:
        """Wait for all pending all-reduces. Collective."""
        while self._open:
            self._read()

    def _read(self) -> None:
        work, numbers = self._open.pop(0)
        work.wait()
        reason, seconds = numbers.tolist()
        self._reason = max(self._reason, int(reason))
        self._slow = seconds > SLOW_SECONDS
