"""Computes the cost of the faults in `make chaos`: the table of their times, and an independent ETTR of the run.

The calculation does not use `gsa_train.goodput`. It uses the time stamps in metrics.jsonl, one step after another, and
the start time of the first process.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsa_train.metrics.goodput.words import table

PARTS = ("import", "process_groups", "health", "checkpoint", "readers", "model", "folder", "first_step")
"""Parts of a restart as in goodput.jsonl, in this order."""
HEAD = (
    "fault",
    "at",
    "step",
    "detected",
    "down",
    *(each.replace("_", " ") for each in PARTS),
    "whole",
    "again",
)


@dataclass
class Happened:
    kind: str
    step: int
    """Last step logged before the fault."""
    at: float
    """Time of the fault in Unix seconds."""
    noticed: str = ""
    """Text in the log."""
    detection_seconds: float = 0.0
    """Seconds from the fault until all ranks had ended, or, for a full disk, until the failed save was logged."""
    seconds: float = 0.0
    """Seconds until a step was trained again, or, for a full disk, until a checkpoint was saved again."""
    steps_lost: int = 0
    start: int | None = None
    """Number of the start that followed, from 0; None if the processes continued."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of that start up to its first step, by PARTS and `down`."""


def starts_in(goodput: Path) -> list[dict[str, float]]:
    """Return for each start in goodput.jsonl `began` (Unix seconds) and the seconds by PARTS up to its first step."""
    found: list[dict[str, float]] = []
    first = 0
    for text in goodput.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "start":
            found.append({"began": line["began"]})
            first = line["step"] + 1
        if line["kind"] in ("start", "steps") and line["step"] <= first:
            found[-1] |= {name: line["seconds"][name] for name in PARTS if name in line["seconds"]}
    return found


def with_parts(happened: Sequence[Happened], starts: Sequence[Mapping[str, float]]) -> None:
    """Fill in the parts of each restart. If a start died early, the next one counts, and the rest is `down`."""
    for each in happened:
        if each.start is not None:
            start = starts[each.start]
            each.parts = {name: start.get(name, 0.0) for name in PARTS}
            each.parts["down"] = max(0.0, start["began"] - each.at - each.detection_seconds)


def table_of(happened: Sequence[Happened], began: float) -> list[str]:
    """Format a line for each fault, in seconds.

    Args:
        began: start of the run in Unix seconds.
    """
    rows = []
    for each in happened:
        parts = [each.parts.get(name) for name in ("down", *PARTS)]
        rows.append(
            (
                each.kind,
                f"{each.at - began:.0f}",
                str(each.step),
                f"{each.detection_seconds:.1f}",
                *("" if part is None else f"{part:.1f}" for part in parts),
                f"{each.seconds:.1f}",
                str(each.steps_lost),
            )
        )
    return table(HEAD, rows)


def productive_by_hand(records: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> float:
    """Sum the seconds of the run's steps from metrics.jsonl, in which every step is logged.

    A step lasts from the previous time stamp to its own. After a save or a validation the step's own `step_seconds`
    counts instead. The wait for text is subtracted. The first step of a start or a phase counts as the mean of its
    phase's others.

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


def ettr_by_hand(records: Sequence[Mapping[str, Any]], starts: Sequence[float], began: float) -> float:
    """
    Args:
        began: start of the first process in Unix seconds.
    """
    return productive_by_hand(records, starts) / (records[-1]["time"] - began)
