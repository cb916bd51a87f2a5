"""Account for a run's wall time from goodput.jsonl: ETTR (effective training time ratio) and lost time.

Each line says how the main rank has spent its time since its process began. `kind` is one of:

    start   the process has opened the run folder; `began` is the time when the process began
    steps   some steps have ended; `phase` is the phase of the last step
    end     the process ends on purpose; `reason` says why
    lost    written by the next start if the process has ended without an `end` line; `time` is the time of the
            process's last sign of life, and `progress` the time of its main thread's last progress

Every line has `time` (Unix seconds), `step`, and `seconds`, a dict activity -> seconds. The seconds add up to `time`
minus `began`, or, in a `lost` line, to `progress` minus `began`. docs/reference/goodput.md defines the terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

START_UP = ("import", "process_groups", "health", "checkpoint", "readers", "model", "folder")
"""Activities of a process before its first step."""
_BETWEEN = ("save", "copies", "validation", "tasks", "text", "stragglers")
ACTIVITIES = (*START_UP, "first_step", "training", *_BETWEEN, "other")
"""Activities of the main thread. `copies`, `text` and `stragglers` are parts of steps."""
LOSSES = (*START_UP, "first_step", "repeated", *_BETWEEN, "detection", "down", "other")
"""Categories of lost time."""
COMPLETE, INTERRUPTED, STOPPED = "complete", "interrupted", "stopped"
"""Reasons of an `end` after a save: no step is left, Ctrl-C, or any other stop request."""
PAUSES = (COMPLETE, INTERRUPTED)
"""Ends that the user chose. The time until the next start does not count."""


@dataclass
class StartAccount:
    began: float
    """Unix seconds."""
    step: int
    """The step after which the run continued."""
    down_seconds: float = 0.0
    """Time between the previous start and this one; 0 after an end listed in PAUSES."""
    start_up_seconds: float = 0.0
    """Start-up time without the first step."""
    detection_seconds: float = 0.0
    """Time from the main thread's last progress to the last sign of life, if the process wrote no end."""
    ended: str = ""
    """Reason of the end; `lost` for a process that wrote no end; empty while the process runs."""
    last_step: int = 0
    repeated_steps: int = 0
    """Number of steps of this and earlier starts that later starts had to repeat."""


@dataclass(frozen=True)
class Account:
    """The account of the run so far. `productive_seconds` and all `lost_seconds` add up to `wall_seconds`."""

    wall_seconds: float
    """Time since the first start, without the time after an end listed in PAUSES."""
    productive_seconds: float
    """Time of the steps whose result the run still has."""
    lost_seconds: dict[str, float]
    """Maps categories in LOSSES to seconds."""
    starts: list[StartAccount]
    steps: int
    """Number of training steps whose time is known, including repeated steps."""
    step_seconds: float | None
    """Mean time of a step, without first steps; None if there are none."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive over wall time."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


@dataclass
class _Stretch:
    """Consecutive steps after `first`, up to `last`."""

    first: int
    last: int
    seconds: float


@dataclass
class _FirstStep:
    """First step of a phase in a process: compilation, and a step."""

    step: int
    seconds: float
    kept: bool = True


@dataclass
class _Phase:
    steps: int = 0
    seconds: float = 0.0
    """Time of the `steps` steps, which excludes first steps."""
    first_steps: list[_FirstStep] = field(default_factory=list)


class Accounting:
    """Accumulates lines one by one, in constant time each."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._kept: list[_Stretch] = []
        self._productive = 0.0
        self._lost = dict.fromkeys(LOSSES, 0.0)
        self._phases: dict[str, _Phase] = {}
        self._starts: list[StartAccount] = []
        self._seconds: Mapping[str, float] = {}
        """`seconds` of the newest line."""
        self._step = 0
        self._time = self._pauses = self._set_back = 0.0
        """`_set_back`: seconds by which clocks were set back between starts."""
        for line in lines:
            self.add(line)

    @property
    def is_complete(self) -> bool:
        return bool(self._starts) and self._starts[-1].ended == COMPLETE

    def add(self, line: Line) -> None:
        """Add the next line of the file. Lines before the first start are ignored."""
        kind = line["kind"]
        if kind == "start":
            self._begin(line)
        if not self._starts:
            return
        spent = {name: value - self._seconds.get(name, 0.0) for name, value in line["seconds"].items()}
        self._seconds, start = line["seconds"], self._starts[-1]
        for name, seconds in spent.items():
            if name not in ("training", "first_step"):
                self._lost[name if name in self._lost else "other"] += seconds
            if name in START_UP:
                start.start_up_seconds += seconds
        training, first = spent.get("training", 0.0), spent.get("first_step", 0.0)
        if kind == "lost":  # no checkpoint holds the work since the previous line
            self._lost["repeated"] += training
            self._lost["first_step"] += first
            start.detection_seconds = max(0.0, line["time"] - line["progress"])
            self._lost["detection"] += start.detection_seconds
        else:
            self._count_steps(line, training, first)
        start.last_step = line["step"]
        if kind in ("end", "lost"):
            start.ended = line.get("reason", kind)
        self._step, self._time = line["step"], line["time"]

    def account(self) -> Account:
        lost, productive = dict(self._lost), self._productive
        for phase in self._phases.values():
            mean = phase.seconds / phase.steps if phase.steps else 0.0
            for first in phase.first_steps:
                usual = min(first.seconds, mean)
                lost["first_step"] += first.seconds - usual
                if first.kept:
                    productive += usual
                else:
                    lost["repeated"] += usual
        wall = self._time - self._starts[0].began - self._pauses + self._set_back if self._starts else 0.0
        lost["other"] += wall - productive - sum(lost.values())  # time of missing lines
        steps = sum(phase.steps for phase in self._phases.values())
        seconds = sum(phase.seconds for phase in self._phases.values())
        return Account(wall, productive, lost, self._starts, steps, seconds / steps if steps else None)

    def _begin(self, line: Line) -> None:
        began, step = line["began"], line["step"]
        start = StartAccount(began, step)
        if self._starts:
            gap = max(0.0, began - self._time)
            self._set_back += max(0.0, self._time - began)
            if self._starts[-1].ended in PAUSES:
                self._pauses += gap
            else:
                start.down_seconds = gap
                self._lost["down"] += gap
            self._go_back(step)
        self._starts.append(start)
        self._seconds, self._step = {}, step

    def _count_steps(self, line: Line, training: float, first: float) -> None:
        steps = max(0, line["step"] - self._step)
        if steps == 0 and training == first == 0:
            return
        phase = self._phases.setdefault(line.get("phase", ""), _Phase())
        if first > 0 and steps > 0:
            phase.first_steps.append(_FirstStep(self._step + 1, first))
            steps -= 1
        elif first > 0 and phase.first_steps:  # the rest of a first step, after its line
            phase.first_steps[-1].seconds += first
        elif first > 0:
            self._lost["first_step"] += first
        phase.steps += steps
        phase.seconds += training
        self._productive += training
        self._kept.append(_Stretch(line["step"] - steps, line["step"], training))

    def _go_back(self, step: int) -> None:
        self._starts[-1].repeated_steps += max(0, self._step - step)
        while self._kept and self._kept[-1].last > step:
            stretch = self._kept.pop()
            again = stretch.seconds * min(1.0, (stretch.last - step) / max(1, stretch.last - stretch.first))
            self._productive -= again
            self._lost["repeated"] += again
            if stretch.first < step:
                self._kept.append(_Stretch(stretch.first, step, stretch.seconds - again))
        for phase in self._phases.values():
            for first in reversed(phase.first_steps):
                if first.step <= step and first.kept:
                    break
                first.kept &= first.step <= step
