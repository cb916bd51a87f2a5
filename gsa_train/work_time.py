"""How long a rank itself works on a step, without the time in which it waits for others: who holds up the run?"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


class WorkTime:
    """Seconds between each `begin` and the next `end`, added up; on a GPU those of the device, read later."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Where this rank no longer waits for another."""
        self._began = self._now()

    def end(self) -> None:
        """Before it waits for others again. Without a `begin` it counts nothing."""
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def read_and_reset(self) -> float:
        """Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
            seconds = sum(begin.elapsed_time(end) / 1000 for begin, end in self._spans)
        else:
            seconds = sum(end - begin for begin, end in self._spans)
        self._spans.clear()
        return float(seconds)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest(work_seconds: Sequence[float]) -> tuple[int, float]:
    """The rank that works longest, and its time over that of the median rank (the lower of the middle two)."""
    rank = max(range(len(work_seconds)), key=work_seconds.__getitem__)
    usual = statistics.median_low(work_seconds)
    return rank, work_seconds[rank] / usual if usual > 0 else 1.0


class StragglerWarning:
    """Names a rank that is much slower than the others at several logged steps in a row."""

    LOGGED_STEPS = 3

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._rank = self._times = 0

    def look(self, step: int, rank: int, ratio: float) -> None:
        self._times = 0 if ratio < self._ratio else self._times + 1 if rank == self._rank else 1
        self._rank = rank
        if self._times == self.LOGGED_STEPS:
            logger.warning(
                "step %d: rank %d works %.2f times as long as the median rank; all others wait for it",
                step,
                rank,
                ratio,
            )
