"""Break down a device's time into compute by trace span, exposed communication and idle time. Each instant counts
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

THE_END = ("(end of the trace)", "")
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


class Interval(NamedTuple):
    """Describes work on a stream of the device: a kernel, a copy or a fill. Times are in microseconds."""

    name: str
    part: str
    """Trace span of its launch."""
    start: float
    end: float
    stream: int

    @property
    def is_communication(self) -> bool:
        """Whether this is a NCCL kernel, whose time includes waiting for other ranks."""
        return "nccl" in self.name.lower()

    @property
    def is_host_copy(self) -> bool:
        return self.name.startswith(HOST_COPIES)


@dataclass(frozen=True)
class Breakdown:
    """Holds microseconds of one device. `parts`, exposed communication and idle add up to `wall`."""

    wall: float
    parts: dict[str, float]
    """Maps trace spans to time, without communication."""
    exposed_communication: float
    """Time in which only NCCL kernels run."""
    overlapped_communication: float
    """Time in which NCCL kernels run in parallel with other kernels. It counts in `parts`."""
    idle: float
    """Time in which nothing runs, as after late launches of the host."""
    waits: dict[tuple[str, str], tuple[float, int]]
    """(name, part) of the work that ends an idle time, or THE_END -> total time, count."""


def breakdown(intervals: Iterable[Interval], begin: float, end: float) -> Breakdown:
    """Attribute each instant from `begin` to `end` to one part of the breakdown. The first case that applies decides:
    - Compute kernels run. The instant counts for the kernel that began first. If two kernels began together, it counts
      for the kernel on the stream with the lower number.
    - NCCL kernels run. The instant counts as exposed communication.
    - A copy between host and device runs. The instant counts for the copy.
    - Nothing runs. The instant counts as idle."""
    ordered = sorted(intervals, key=lambda each: (each.start, each.stream))
    edges = []
    for number, each in enumerate(ordered):
        first, last = max(each.start, begin), min(each.end, end)
        if first < last:
            edges += [(first, True, number), (last, False, number)]
    edges.sort()  # at one instant, ends come before begins
    active: dict[int, Interval] = {}
    parts: dict[str, float] = defaultdict(float)
    waits: dict[tuple[str, str], tuple[float, int]] = {}
    exposed = overlapped = idle = wait = 0.0
    now = begin
    for time, begins, number in [*edges, (end, False, -1)]:
        span, now = time - now, time
        if span > 0:
            running = list(active.values())  # in order of begin
            kernels = [each for each in running if not each.is_communication and not each.is_host_copy]
            copies = [each for each in running if each.is_host_copy]
            communicates = any(each.is_communication for each in running)
            if kernels:
                parts[kernels[0].part] += span
                overlapped += span if communicates else 0.0
            elif communicates:
                exposed += span
            elif copies:
                parts[copies[0].part] += span
            else:
                idle += span
                wait += span
        if wait and (begins or number < 0):
            ends_it = (ordered[number].name, ordered[number].part) if begins else THE_END
            total, times = waits.get(ends_it, (0.0, 0))
            waits[ends_it] = total + wait, times + 1
            wait = 0.0
        if begins:
            active[number] = ordered[number]
        else:
            active.pop(number, None)
    return Breakdown(end - begin, dict(parts), exposed, overlapped, idle, waits)
