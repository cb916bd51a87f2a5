"""Simulate a run of many GPUs with random faults, restarts and saves, from measured times.

Each GPU fails after an exponentially distributed time. Among `gpus` GPUs one fails every `mtbf / gpus` seconds on
average. A fault costs the work since the newest durable checkpoint, the time until the fault is detected, the time
until the next start, and that start. No fault strikes while the run is down.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

SECONDS_PER_DAY = 86400.0
GRID = 2**0.25
"""Ratio of consecutive intervals that are tried."""
REACH = 8.0
"""The search runs from Young's interval / REACH to Young's interval * REACH."""


@dataclass(frozen=True)
class Parts:
    """Holds the parts of a run, in seconds of wall time."""

    step_seconds: float
    """Time of a step, without the parts in `extra_share`."""
    stall_seconds: float
    """How long training waits for a save."""
    durable_seconds: float
    """Time from a save's begin until a restart would find the checkpoint. The next save waits for it."""
    start_up_seconds: float
    """Time from a process's begin to its first step, including compilation."""
    detection_seconds: float
    """Time from a fault to the end of the processes."""
    down_seconds: float
    """Time from the end of the processes to the start of the next processes."""
    extra_share: float = 0.0
    """Seconds of validation, tasks, waiting for text and the like for each second of steps."""

    @property
    def whole_step_seconds(self) -> float:
        """Returns the time of a step with its share of `extra_share`."""
        return self.step_seconds * (1 + self.extra_share)


class Life(NamedTuple):
    """The life of one start's processes."""

    seconds: float
    """Time from the begin of the processes to the fault, or to the stop."""
    saves_at_end: bool = False
    """Whether the processes were asked to stop, saved, and waited for the save."""
    start_up_seconds: float | None = None
    """Start-up of these processes; None: the usual time."""
    down_seconds: float | None = None
    """Time until the next start; None: the usual time."""


@dataclass
class Outcome:
    """Holds seconds, except `faults`. `wall` is the sum of the other times."""

    wall: float = 0.0
    productive: float = 0.0
    start_up: float = 0.0
    stalls: float = 0.0
    extra: float = 0.0
    repeated: float = 0.0
    detection: float = 0.0
    down: float = 0.0
    faults: int = 0

    @property
    def ettr(self) -> float:
        return self.productive / self.wall if self.wall > 0 else 0.0


def simulate(parts: Parts, interval_steps: int, lives: Iterable[Life], wall_seconds: float) -> Outcome:
    """Simulate a run of `wall_seconds`, with a save every `interval_steps`. All steps of the last start count, even
    unsaved.

    Raises:
        ValueError: the lives do not fill the time.
    """
    found, left = Outcome(wall=wall_seconds), wall_seconds
    for life in lives:
        survives = life.seconds >= left
        own = (
            parts if life.start_up_seconds is None else replace(parts, start_up_seconds=life.start_up_seconds)
        )
        start_up, worked, stalls, durable = _one_life(own, interval_steps, min(life.seconds, left))
        if life.saves_at_end:
            last_save = min(worked, parts.durable_seconds)
            stalls, worked = stalls + last_save, worked - last_save
        kept = worked if survives or life.saves_at_end else durable
        found.start_up += start_up
        found.stalls += stalls
        found.productive += kept / (1 + parts.extra_share)
        found.repeated += (worked - kept) / (1 + parts.extra_share)
        found.extra += worked * parts.extra_share / (1 + parts.extra_share)
        if survives:
            break
        left -= life.seconds
        found.faults += not life.saves_at_end
        detection = 0.0 if life.saves_at_end else min(parts.detection_seconds, left)
        usual_down = parts.down_seconds if life.down_seconds is None else life.down_seconds
        down = min(usual_down, left - detection)
        found.detection += detection
        found.down += down
        left -= detection + down
        if left <= 0:
            break
    else:
        raise ValueError(f"the lives end {left:g} s before the run's {wall_seconds:g} s: give more of them")
    return found


def _one_life(parts: Parts, interval_steps: int, seconds: float) -> tuple[float, float, float, float]:
    """Returns start-up, time in steps, time in stalls, and the time of steps in the newest durable checkpoint."""
    start_up = min(parts.start_up_seconds, seconds)
    trains = seconds - start_up
    work = interval_steps * parts.whole_step_seconds
    cycle = max(work + parts.stall_seconds, parts.durable_seconds)  # A save waits for the previous save.
    begun = _count(trains - work, cycle)
    durable = _count(trains - work - parts.durable_seconds, cycle)
    stalls = 0.0
    if begun > 0:
        # Only the stall of the newest save is known to follow its begin.
        since_begin = trains - work - (begun - 1) * cycle
        rest = max(0.0, since_begin - parts.stall_seconds - work)  # waits for the save in progress
        stalls = (begun - 1) * (cycle - work) + min(parts.stall_seconds, since_begin) + rest
    return start_up, trains - stalls, stalls, durable * work


def _count(seconds: float, cycle: float) -> int:
    """Returns the number of moments (0, one cycle, two cycles ...) that have passed."""
    return 0 if seconds < 0 else int(seconds / cycle) + 1


def lives_by_chance(mean_seconds: float, seed: int) -> Iterator[Life]:
    chance = random.Random(seed)
    while True:
        yield Life(chance.expovariate(1 / mean_seconds))


@dataclass(frozen=True)
class Tried:
    """Holds simulated runs with one interval between saves."""

    interval_steps: int
    runs: list[Outcome]

    @property
    def ettr(self) -> float:
        return statistics.fmean(each.ettr for each in self.runs)

    @property
    def error(self) -> float:
        return statistics.stdev(each.ettr for each in self.runs) / math.sqrt(len(self.runs))

    @property
    def faults(self) -> float:
        return statistics.fmean(each.faults for each in self.runs)

    def share(self, part: str) -> float:
        """Returns a part's share of the wall time, mean over the runs."""
        return statistics.fmean(getattr(each, part) / each.wall for each in self.runs)


def try_interval(
    parts: Parts, interval_steps: int, mean_seconds: float, days: float, trials: int, seed: int
) -> Tried:
    """Simulate runs of this many days with one interval. The same seeds draw the same faults for every interval.

    Args:
        mean_seconds: between faults of the whole run.
    """
    runs = [
        simulate(parts, interval_steps, lives_by_chance(mean_seconds, seed + trial), days * SECONDS_PER_DAY)
        for trial in range(trials)
    ]
    return Tried(interval_steps, runs)


def try_intervals(parts: Parts, mean_seconds: float, days: float, trials: int, seed: int) -> list[Tried]:
    """Try intervals around Young's interval, in ascending order. The best interval has the highest ETTR. If the time
    of a save is longer than Young's interval, saves would wait for each other. Intervals around that time are then
    tried."""
    middle = (
        max(young_seconds(parts.stall_seconds, mean_seconds), parts.durable_seconds)
        / parts.whole_step_seconds
    )
    count = round(math.log(REACH, GRID))
    steps = sorted({max(1, round(middle * GRID**power)) for power in range(-count, count + 1)})
    return [try_interval(parts, each, mean_seconds, days, trials, seed) for each in steps]


def young_seconds(stall_seconds: float, mean_seconds: float) -> float:
    """Returns the work between two saves by Young (1974): sqrt(2 C M), first order in C / M. C is the stall of a save,
    and M the mean time between faults."""
    return math.sqrt(2 * stall_seconds * mean_seconds)


def daly_seconds(stall_seconds: float, mean_seconds: float) -> float:
    """Returns the work between two saves by Daly (2006), of higher order than Young's. If the stall of a save exceeds 2
    M, with M the mean time between faults, the result is M."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = math.sqrt(stall_seconds / (2 * mean_seconds))
    return young_seconds(stall_seconds, mean_seconds) * (1 + ratio / 3 + ratio**2 / 9) - stall_seconds


def first_order_ettr(parts: Parts, interval_seconds: float, mean_seconds: float) -> float:
    """Returns the ETTR that Young's formula maximises: 1 - C / T - (T / 2 + restart) / M, for C << T << M. C is the
    stall of a save, T the work between two saves, and M the mean time between faults."""
    restart = parts.start_up_seconds + parts.detection_seconds + parts.down_seconds
    return 1 - parts.stall_seconds / interval_seconds - (interval_seconds / 2 + restart) / mean_seconds
