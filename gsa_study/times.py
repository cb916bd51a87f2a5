"""Record the times of a study's jobs in `times.jsonl`, and predict which jobs a start can finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gsa_study.jobs import Job
from gsa_study.states import append_note, newest_checkpoint, read_notes
from gsa_train.checkpoint.files import step_of

TIMES = "times.jsonl"
SAME_ARM, OTHER_ARM, CUT = 1.1, 1.5, 1.5
"""Expected time divided by the measured time of the arm's other seeds, of another arm, or of a job that was stopped
before its end. The slowest of the paper's four models takes 1.4 times the fastest, including its start."""
MANY_ARMS, BESIDE_MANY = 2, 1.25
"""Expected time of another arm divided by the slowest of MANY_ARMS measured arms."""


@dataclass(frozen=True)
class WallTimes:
    """Holds seconds by the key of the job."""

    ended: dict[str, float] = field(default_factory=dict)
    """Jobs that ended in the start that began them."""
    cut: dict[str, float] = field(default_factory=dict)
    """Seconds after which a job that began from nothing was stopped before its end."""


def note_time(study_folder: Path, key: str, seconds: float, ended: bool) -> None:
    append_note(study_folder / TIMES, {"job": key, "seconds": round(seconds, 3), "ended": ended})


def read_times(study_folder: Path) -> WallTimes:
    times = WallTimes()
    for note in read_notes(study_folder / TIMES):
        key, seconds, ended = note.get("job"), note.get("seconds"), note.get("ended")
        if isinstance(key, str) and isinstance(seconds, int | float):
            (times.ended if ended else times.cut)[key] = float(seconds)
    return times


@dataclass(frozen=True)
class Expected:
    seconds: float
    is_guess: bool
    """True if no job of its arm was measured."""


def expected_time(job: Job, jobs: Sequence[Job], times: WallTimes) -> Expected | None:
    """Return the time of the job, or None if nothing like it was measured.

    A training counts together with its evaluations, which need its checkpoint.
    """
    own = _of_one(job, jobs, times)
    if own is None or job.kind != "train":
        return own
    evaluations = (
        _of_one(each, jobs, times) for each in jobs if each.run.name == job.run.name and each != job
    )
    return Expected(own.seconds + sum(each.seconds for each in evaluations if each is not None), own.is_guess)


def _of_one(job: Job, jobs: Sequence[Job], times: WallTimes) -> Expected | None:
    measured = [
        (each, times.ended[each.key]) for each in jobs if each.kind == job.kind and each.key in times.ended
    ]
    of_arm = [seconds for each, seconds in measured if each.run.arm == job.run.arm and each.name == job.name]
    of_others = [seconds for _, seconds in measured]
    cut = CUT * times.cut.get(job.key, 0.0)
    is_one_of_many = len({each.run.arm for each, _ in measured}) >= MANY_ARMS
    beside = (BESIDE_MANY if is_one_of_many else OTHER_ARM) * max(of_others, default=0.0)
    seconds = max(cut, SAME_ARM * max(of_arm) if of_arm else beside)
    if seconds == 0:
        return None
    if job.kind == "train":
        done = step_of(newest_checkpoint(job.run.folder)) or 0
        seconds *= 1 - done / job.run.steps
    return Expected(seconds, is_guess=not of_arm and job.key not in times.cut)
