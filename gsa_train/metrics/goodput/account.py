"""Where a run's wall time went: lines of goodput.jsonl -> ETTR and the time lost, each second once.

A line says what the main rank had spent its time on, in seconds since its process began, when the run stood at a step:

    start   the process has opened the run folder: `began`, when it began itself
    steps   the number of steps done (`phase` of the last one)
    rewind  the run stands at an earlier checkpoint again
    end     the process leaves on purpose: `reason`
    lost    written by the next start for a process that did not say `end`: `time` is its last sign of life, `progress`
            the last moment at which its main thread went on

Every line has `time` (Unix seconds), `step`, and `seconds`: activity -> seconds, which add up to `time` - `began`
(`progress` - `began` of a `lost` line). docs/reference/goodput.md defines the terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

START_UP = ("import", "process_groups", "health", "checkpoint", "readers", "model", "folder")
"""Activities of a process before its first step, and in a rewind."""
ACTIVITIES = (
    *START_UP,
    "first_step",
    "training",
    "save",
    "copies",
    "validation",
    "tasks",
    "text",
    "stragglers",
    "other",
)
"""What a main thread spends its time on; `copies`, `text` and `stragglers` are parts of steps."""
LOSSES = (
    *START_UP,
    "first_step",
    "repeated",
    "save",
    "copies",
    "validation",
    "tasks",
    "text",
    "stragglers",
    "detection",
    "down",
    "other",
)
"""What a second may be lost to."""
COMPLETE, INTERRUPTED, STOPPED = "complete", "interrupted", "stopped"
"""Reasons of an `end` after a save: no step is left, Ctrl-C, or any other stop request."""
PAUSES = (COMPLETE, INTERRUPTED)
"""Ends that the user chose: what passes until the next start is no time of the run's."""


@dataclass
class StartAccount:
    """One start of the run."""

    began: float
    """Unix seconds."""
    step: int
    """The step after which the run continued."""
    down_seconds: float = 0.0
    """Between the previous start and this one; 0 after an end listed in PAUSES."""
    start_up_seconds: float = 0.0
    """Without the first step."""
    detection_seconds: float = 0.0
    """Of the fault that ended it."""
    ended: str = ""
    """Reason of its end, `lost` for a process that could not say one; empty while it runs."""
    until: float = 0.0
    """Unix seconds of its newest line; of one that ended by a fault, its last sign of life."""
    last_step: int = 0
    repeated_steps: int = 0
    """Of its steps and of those before, which later starts had to do again."""


@dataclass(frozen=True)
class Account:
    """The run so far. `productive_seconds` and all of `lost_seconds` add up to `wall_seconds`."""

    wall_seconds: float
    """Since the first start, without the time after an end listed in PAUSES."""
    productive_seconds: float
    """Of the steps whose result the run still has."""
    lost_seconds: dict[str, float]
    """Of LOSSES."""
    starts: list[StartAccount]
    steps: int
    """Training steps whose time is known, those that were done again included."""
    step_seconds: float | None
    """Mean of those, without first steps; None before there are any."""
    saves: int
    """That training waited for."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive over wall time."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


@dataclass
class _Stretch:
    """Steps after `first`, up to `last`, in one go."""

    first: int
    last: int
    seconds: float


@dataclass
class _FirstStep:
    """Of a phase in a process: compilation, and a step."""

    step: int
    seconds: float
    kept: bool = True


@dataclass
class _Phase:
    steps: int = 0
    seconds: float = 0.0
    """Of these steps."""
    first_steps: list[_FirstStep] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """Seconds of a step that is no first one; 0 where none is known."""
        return self.seconds / self.steps if self.steps else 0.0


class Accounting:
    """Adds up lines one after another, in constant time each."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._kept: list[_Stretch] = []
        self._productive = 0.0
        self._lost = dict.fromkeys(LOSSES, 0.0)
        self._phases: dict[str, _Phase] = {}
        self._starts: list[StartAccount] = []
        self._seconds: Mapping[str, float] = {}
        """Of the newest line."""
        self._step = self._saves = 0
        self._time = self._pauses = self._set_back = 0.0
        """The last: seconds by which clocks were set back between starts."""
        for line in lines:
            self.add(line)

    @property
    def is_complete(self) -> bool:
        """The newest start has ended the run."""
        return bool(self._starts) and self._starts[-1].ended == COMPLETE

    def add(self, line: Line) -> None:
        """The next line of the file. What comes before the first start is left out."""
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
        self._saves += spent.get("save", 0.0) > 0
        if kind in ("lost", "rewind"):  # no checkpoint has what was done since the line before
            self._lost["repeated"] += spent.get("training", 0.0)
            self._lost["first_step"] += spent.get("first_step", 0.0)
        else:
            self._count_steps(line, spent.get("training", 0.0), spent.get("first_step", 0.0))
        if kind == "lost":
            start.detection_seconds = max(0.0, line["time"] - line["progress"])
            self._lost["detection"] += start.detection_seconds
        start.last_step, start.until = line["step"], line["time"]
        if kind == "rewind":
            self._go_back(line["step"])
        if kind in ("end", "lost"):
            start.ended = line.get("reason", kind)
        self._step, self._time = line["step"], line["time"]

    def account(self) -> Account:
        lost, productive = dict(self._lost), self._productive
        for phase in self._phases.values():
            for first in phase.first_steps:
                usual = min(first.seconds, phase.usual)
                lost["first_step"] += first.seconds - usual
                if first.kept:
                    productive += usual
                else:
                    lost["repeated"] += usual
        wall = self._time - self._starts[0].began - self._pauses + self._set_back if self._starts else 0.0
        lost["other"] += wall - productive - sum(lost.values())  # lines that are missing
        steps, seconds = (
            sum(getattr(each, name) for each in self._phases.values()) for name in ("steps", "seconds")
        )
        return Account(
            wall, productive, lost, self._starts, steps, seconds / steps if steps else None, self._saves
        )

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
        elif first > 0 and phase.first_steps:  # the rest of one, after its line
            phase.first_steps[-1].seconds += first
        elif first > 0:
            self._lost["first_step"] += first
        phase.steps += steps
        phase.seconds += training
        self._productive += training
        self._kept.append(_Stretch(line["step"] - steps, line["step"], training))

    def _go_back(self, step: int) -> None:
        """Count the steps after `step` as repeated."""
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
