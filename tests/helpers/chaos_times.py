"""Records a fault of `make chaos`, and calculates a run's productive time from metrics.jsonl without
`gsa_train.goodput`."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Happened:
    kind: str
    step: int
    """Last step logged before the fault."""
    at: float
    """Time of the fault in Unix seconds."""
    noticed: str = ""
    """Text in the log."""
    seconds: float = 0.0
    """Seconds until a step was trained again, or, for a full disk, until a checkpoint was saved again."""
    steps_lost: int = 0


def productive_by_hand(records: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> float:
    """Sum the seconds of the run's steps from metrics.jsonl, in which every step is logged.

    A step's time is the difference between the timestamps of the step's record and the previous record. If a save or
    validation lies between these records, the time is `step_seconds` of the step's record instead. In both cases, time
    spent waiting for data is subtracted. The first step of a process or phase gets the mean of the phase's other steps.

    Args:
        starts: when processes opened the run folder (starts.jsonl), in Unix seconds.
    """
    steps = {record["step"]: record for record in records if "event" not in record}
    behind_events = {record["step"] + 1 for record in records if "event" in record}
    usual: dict[str, list[float]] = defaultdict(list)
    firsts: dict[str, int] = defaultdict(int)
    for step, record in steps.items():
        before, phase = steps.get(step - 1), record["phase"]
        if (
            before is None
            or before["phase"] != phase
            or any(before["time"] < each < record["time"] for each in starts)
        ):
            firsts[phase] += 1
            continue
        is_clean = step not in behind_events
        seconds = record["time"] - before["time"] if is_clean else record["step_seconds"]
        usual[phase].append(seconds - record["data_wait_seconds"])
    return sum(sum(found) + firsts[phase] * statistics.fmean(found) for phase, found in usual.items())
