"""Where a device's time goes, each instant counted once: compute by part, communication that nothing hides, idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

THE_END = ("(end of the trace)", "")
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


class Interval(NamedTuple):
    """What runs on a stream of the device: a kernel, a copy or a fill. Microseconds."""

    name: str
    part: str
    """Of the step, that its launch belongs to."""
    start: float
    end: float
    stream: int

    @property
    def is_communication(self) -> bool:
        """NCCL's kernels, which run as long as they wait for other ranks, too."""
        return "nccl" in self.name.lower()

    @property
    def is_host_copy(self) -> bool:
        return self.name.startswith(HOST_COPIES)


@dataclass(frozen=True)
class Breakdown:
    """Microseconds of one device. `parts`, exposed communication and idle add up to `wall`."""

    wall: float
    parts: dict[str, float]
    """Without communication."""
    exposed_communication: float
    """A NCCL kernel runs, and no other kernel."""
    overlapped_communication: float
    """A NCCL kernel runs beside others; the time is in `parts`."""
    idle: float
    """Nothing runs: launches that come too late, the host."""
    waits: dict[tuple[str, str], tuple[float, int]]
    """(name, part) of what ends an idle time, or THE_END -> that time in all, and how often."""


def breakdown(intervals: Iterable[Interval], begin: float, end: float) -> Breakdown:
    """Attribute each instant from `begin` to `end` once.

    It counts to the running kernel that began first, communication aside (if two began together, to the one on the
    lower stream). Where there is none, to communication; where there is none either, to a copy between host and
    device, which needs no kernel's place; else the device is idle.
    """
    ordered = sorted(intervals, key=lambda each: (each.start, each.stream))
    edges = []
    for number, each in enumerate(ordered):
        first, last = max(each.start, begin), min(each.end, end)
        if first < last:
            edges += [(first, True, number), (last, False, number)]
    edges.sort()  # at one instant, what ends goes before what begins
    active: dict[int, Interval] = {}
    parts: dict[str, float] = defaultdict(float)
    waits: dict[tuple[str, str], tuple[float, int]] = {}
    exposed = overlapped = idle = wait = 0.0
    now = begin
    for time, begins, number in [*edges, (end, False, -1)]:
        span, now = time - now, time
        if span > 0:
            running = list(active.values())  # in the order of their beginnings
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
