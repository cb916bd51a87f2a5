"""Read the values that a study compares from the folders of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from gsa_eval.run_records import records_of
from gsa_study.states import is_complete, read_json
from gsa_study.study_file import StudyRun
from gsa_train.metrics.record_format import Record, numbers_back
from gsa_train.run_folder.starts import read_starts

Points = Sequence[tuple[float, float]]
"""(x, y) in ascending order of x."""
Over = Literal["tokens", "seconds"]


class LossPoint(NamedTuple):
    tokens: float
    seconds: float | None
    """Training time; None: not known."""
    loss: float


class RunMetrics:
    """Holds values that a run has logged so far."""

    def __init__(self, run: StudyRun) -> None:
        self.run = run
        records = records_of(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
        self.records = [with_means(record) for record in records]
        self.complete = is_complete(run)
        self.starts = read_starts(run.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self.run.folder / "summary.json")

    @property
    def records_end_at(self) -> int | None:
        """If the records of a finished run end before its last step, as in a copy that was cut off, return the step of
        the last record. Otherwise return None."""
        last = int(self.records[-1]["step"]) if self.records else 0
        return last if self.complete and last < self.run.steps else None

    @cached_property
    def tokens(self) -> Points:
        """Return (step, tokens trained on)."""
        return token_knots(self.records)

    @cached_property
    def seconds(self) -> Points:
        """Return (step, seconds of training)."""
        return time_knots(self.records)

    def curve(self, key: str, over: Over) -> list[tuple[float, float]]:
        """Return (tokens or seconds, value) of each record with the key."""
        knots = self.seconds if over == "seconds" else self.tokens
        points = [
            (interpolate(knots, record["step"]), float(record[key]))
            for record in self.records
            if is_number(record.get(key))
        ]
        return [(x, y) for x, y in points if x is not None]

    def losses(self) -> list[LossPoint]:
        return [
            LossPoint(float(tokens), interpolate(self.seconds, record["step"]), float(record["loss"]))
            for record in self.records
            if is_number(record.get("loss"))
            and (tokens := interpolate(self.tokens, record["step"])) is not None
        ]

    def statistic(self, key: str, statistic: str) -> float | None:
        """Return the largest, the median or the last logged value. If any step has NaN, the largest value and the
        median are NaN."""
        records = self.records
        if statistic != "last":
            records = [record for record in records if "event" not in record]
        values = [float(record[key]) for record in records if is_number(record.get(key))]
        if not values:
            return None
        if statistic == "last":
            return values[-1]
        if any(map(math.isnan, values)):
            return math.nan
        return max(values) if statistic == "max" else statistics.median(values)

    def of_evaluation(self, name: str, key: str) -> float | None:
        """Return a value such as `data.validation.loss` of the evaluation's results, or None."""
        found: Any = read_json(self.run.folder / "evaluations" / name / "results.json")
        for part in key.split("."):
            if isinstance(found, list):
                found = dict(enumerate(found)).get(int(part)) if part.isdecimal() else None
            else:
                found = found.get(part) if isinstance(found, dict) else None
        return number_of(found)


def with_means(record: Record) -> Record:
    """Return the record with the entries of its dicts as separate keys, such as `lrs: base` and `eval_bits_per_byte:
    piqa`. For scores of tasks (`eval_...`), the dict's own key gets the mean over all tasks."""
    found: Record = {}
    for key, value in record.items():
        if not isinstance(value, dict):
            found[key] = value
            continue
        found |= {f"{key}: {name}": number for name, number in value.items()}
        if key.startswith("eval_") and value and all(map(is_number, value.values())):
            found[key] = statistics.fmean(value.values())
    return found


def token_knots(records: list[Record]) -> list[tuple[int, int]]:
    """Return points (step, trained tokens), between which the tokens grow linearly: the first step, the last step, and
    each step at which the tokens per step change. If the tokens are unknown, the list is empty."""
    counted = {
        record["step"]: record["tokens"] for record in records if record.get("tokens") and record["step"]
    }
    knots: list[tuple[int, int]] = []
    for point in sorted(counted.items()):
        knots = knots or [(0, 0)]
        if len(knots) > 1:
            (step_0, tokens_0), (step_1, tokens_1) = knots[-2:]
            if (tokens_1 - tokens_0) * (point[0] - step_1) == (point[1] - tokens_1) * (step_1 - step_0):
                knots.pop()
        knots.append(point)
    return knots


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_of(value: Any) -> float | None:
    """Return a value of summary.json or results.json as a number, or None if the value is not a number.

    The two files store infinity and NaN as text, which the function turns back into numbers.
    """
    number = numbers_back(value)
    return float(number) if is_number(number) else None


def time_knots(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return points (step, training seconds so far) for the start of the run and the end of each phase. Every step of a
    phase counts as the phase's median `step_seconds`. Time lost to compilation, other load on the machine, validation,
    saves and restarts is therefore left out."""
    steps = [record for record in records if "event" not in record and is_number(record.get("step_seconds"))]
    if not steps:
        return []
    changes = ((before, after) for before, after in pairwise(steps) if before["phase"] != after["phase"])
    starts = [(0, steps[0]["phase"]), *((before["step"], after["phase"]) for before, after in changes)]
    ends = [start for start, _ in starts[1:]] + [steps[-1]["step"]]
    knots = [(0.0, 0.0)]
    for (start, name), end in zip(starts, ends, strict=True):
        seconds = statistics.median(record["step_seconds"] for record in steps if record["phase"] == name)
        knots.append((float(end), knots[-1][1] + (end - start) * seconds))
    return knots


def interpolate(points: Points, x: float) -> float | None:
    """Return y at x by linear interpolation between the two neighbouring points, or None if x is outside the points'
    range. If points have the same x, such as a step's record and its validation record, the last one counts."""
    known = dict(points)
    if x in known:
        return known[x]
    below = max((each for each in known if each < x), default=None)
    above = min((each for each in known if each > x), default=None)
    if below is None or above is None:
        return None
    share = (x - below) / (above - below)
    return (1 - share) * known[below] + share * known[above]


def first_reached(points: Points, y: float) -> float | None:
    """Return x where the points first fall to y, on the straight line between the neighbours, or None."""
    if points and points[0][1] <= y:
        return points[0][0]
    for (x, before), (end, value) in pairwise(points):
        if value <= y:
            return x + (before - y) / (before - value) * (end - x)
    return None
