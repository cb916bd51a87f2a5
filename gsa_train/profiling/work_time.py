"""Measure how long a rank works on each step, excluding waits for other ranks. Also time the step's parts.

The module also warns of stragglers.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gsa_train.profiling.trace_spans import trace_span
from gsa_train.services import Service

logger = logging.getLogger(__name__)


STEP_PARTS = ("forward_backward", "gradient_reduction", "optimizer")
"""Parts of a step that `WorkTime.part` measures, without overlap."""


class Worked(NamedTuple):
    seconds: float
    """Sum over the spans from each `begin` to the next `end`."""
    parts: dict[str, float]
    """Seconds by part of STEP_PARTS, including waits for other ranks."""


class WorkTime:
    """Sums the seconds from each `begin` to the next `end`. On a GPU the seconds are device time, which is read
    later."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._parts: dict[str, list[tuple[Any, Any]]] = {name: [] for name in STEP_PARTS}

    def begin(self) -> None:
        """Begin a span; call it when this rank no longer waits for others."""
        self._began = self._now()

    def end(self) -> None:
        """End the span; call it before this rank waits for others again. Does nothing without a `begin`."""
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one of STEP_PARTS. The gradient reduction runs inside forward and backward, and is subtracted from
        their time."""
        began = self._now()
        with trace_span("communication" if name == "gradient_reduction" else name):
            yield
        self._parts[name].append((began, self._now()))

    def read_and_reset(self) -> Worked:
        """Returns the times of all spans that have ended. Spans that a GPU still runs count at the next read."""
        parts = {name: self._take(spans) for name, spans in self._parts.items()}
        parts["forward_backward"] -= parts["gradient_reduction"]
        return Worked(self._take(self._spans), parts)

    def reset(self) -> None:
        for spans in (self._spans, *self._parts.values()):
            spans.clear()

    def _take(self, spans: list[tuple[Any, Any]]) -> float:
        if self._on_gpu:
            ended = list(itertools.takewhile(lambda span: span[1].query(), spans))
            seconds = float(sum(begin.elapsed_time(end) for begin, end in ended)) / 1000
        else:
            ended = list(spans)
            seconds = float(sum(end - begin for begin, end in ended))
        del spans[: len(ended)]
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest(work_seconds: Sequence[float]) -> tuple[int, float]:
    """Returns the rank that works longest, and its time divided by the median rank's time. The median is the lower of
    the middle two."""
    rank = max(range(len(work_seconds)), key=work_seconds.__getitem__)
    usual = statistics.median_low(work_seconds)
    return rank, work_seconds[rank] / usual if usual > 0 else 1.0


class StragglerWarning(Service):
    """Names a rank that is much slower than the others at several logged steps in a row."""

    LOGGED_STEPS = 3

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._rank = self._times = 0

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        rank, ratio = record["slowest_rank"], record["slowest_rank_ratio"]
        self._times = 0 if ratio < self._ratio else self._times + 1 if rank == self._rank else 1
        self._rank = rank
        if self._times == self.LOGGED_STEPS:
            logger.warning(
                "step %d: rank %d works %.2f times as long as the median rank; all others wait for it",
                record["step"], rank, ratio,
            )  # fmt: skip
