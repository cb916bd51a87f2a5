"""All ranks stop before the same step, though the signal reached one of them, or each at another moment."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gsa_train.reliability.stop_signals import StopRequest

SLOW_SECONDS = 1.0
"""Between two questions; above it the answer is waited for: a hundred ranks answer in milliseconds."""


class StopVote:
    """The largest reason of all ranks, by all-reduces of two numbers over CPUs (gloo): the device is not asked.

    The answer to a question is read when the next one is asked, so hosts that queue work for their GPUs need not
    wait for each other. Where steps are slow that would be a step too late, so there it is read at once. All ranks
    see the same answers, the time between questions among them, and so decide alike.
    """

    def __init__(self, request: StopRequest, timeout: timedelta) -> None:
        """Collective over all ranks."""
        self._request = request
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._open: list[tuple[dist.Work, torch.Tensor]] = []
        self._slow = True  # nothing is known yet, and a stop before the first step must be seen
        self._reason = 0
        self._last_asked = time.monotonic()

    def ask(self) -> int:
        """0 to go on, else why all ranks stop here. Collective."""
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
        """Read what is open. Collective."""
        while self._open:
            self._read()

    def _read(self) -> None:
        work, numbers = self._open.pop(0)
        work.wait()
        reason, seconds = numbers.tolist()
        self._reason = max(self._reason, int(reason))
        self._slow = seconds > SLOW_SECONDS
