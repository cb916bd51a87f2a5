"""Decide from the states of the jobs which jobs are finished, which run next, and which are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from gsa_study.jobs import Job
from gsa_study.states import JobState
from gsa_train.process import exit_codes
from gsa_train.reliability.stop_signals import reason_in_words


class StudyError(ValueError):
    """The study cannot be started with this file, or on this machine."""


@dataclass(frozen=True)
class StudyPlan:
    """Lists all jobs by state, each list in the order of the study."""

    finished: tuple[Job, ...]
    failed: tuple[tuple[Job, str], ...]
    """Failed jobs with the reason. They are tried again only on request."""
    due: tuple[Job, ...]
    """Jobs to start or continue; each run's training comes first."""
    blocked: tuple[Job, ...]
    """Jobs that need a training that has failed or cannot run here."""
    without_checkpoint: tuple[Job, ...] = ()
    """Jobs that need a finished run's checkpoint, which is missing in this folder."""


def check_unchanged(states: Sequence[JobState]) -> None:
    """Check that no job began with another config or command than the study file now has.

    Args:
        states: states of all jobs of the study, because the report covers all jobs even if the user asks for some.

    Raises:
        StudyError: a job began with another config or command. The error names each field.
    """
    changed: dict[str, list[Path]] = {}
    for state in states:
        for change in state.changed:
            changed.setdefault(change, []).append(state.job.run.folder)
    if changed:
        raise StudyError(
            "\n  ".join([
                "the study asks for something else than what its runs began with. Put the field back, give the arm "
                "another name, or remove the folder:",
                *(f"{in_words(folders)}: {change}" for change, folders in changed.items()),
            ])
        )  # fmt: skip


def plan_study(
    states: Sequence[JobState], failures: Mapping[str, str], retry_failed: bool = False
) -> StudyPlan:
    """Sort the jobs.

    Args:
        failures: job -> why it failed.
        retry_failed: failed jobs are due again.
    """
    finished, failed, due, blocked, lacking = [], [], [], [], []
    without_training = {
        state.job.run.name
        for state in states
        if state.job.kind == "train" and not state.finished
        and state.job.key in failures and not retry_failed
    }  # fmt: skip
    for state in states:
        job, reason = state.job, failures.get(state.job.key)
        if state.finished:
            finished.append(job)
        elif state.lacks_checkpoint:
            lacking.append(job)
        elif reason is not None and not retry_failed:
            failed.append((job, reason))
        elif job.kind != "train" and job.run.name in without_training:
            blocked.append(job)
        else:
            due.append(job)
    return StudyPlan(tuple(finished), tuple(failed), tuple(due), tuple(blocked), tuple(lacking))


def in_words(folders: Sequence[Path]) -> str:
    """Return the first folder and the number of other folders, because one change may affect all runs of a study."""
    more = len(set(folders)) - 1
    return f"{folders[0]} and {more} more" if more else str(folders[0])


def chosen(
    states: Sequence[JobState], arms: Collection[str] | None, seeds: Collection[int] | None
) -> list[JobState]:
    """Return the states of some arms and seeds (None: all).

    Raises:
        StudyError: the study has no such arm or seed.
    """
    known_arms = dict.fromkeys(state.job.run.arm for state in states)
    known_seeds = sorted({state.job.run.seed for state in states})
    for arm in arms or ():
        if arm not in known_arms:
            close = get_close_matches(arm, known_arms, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known_arms)}"
            raise StudyError(f"--arms {arm}: the study has no such arm; {hint}")
    for seed in seeds or ():
        if seed not in known_seeds:
            raise StudyError(f"--seeds {seed}: the study has {', '.join(map(str, known_seeds))}")
    return [
        state
        for state in states
        if (arms is None or state.job.run.arm in arms) and (seeds is None or state.job.run.seed in seeds)
    ]


def next_job(due: Sequence[Job], running: Collection[Job], free_devices: int | None) -> Job | None:
    """Returns the first due job that can start: its training is finished, and enough devices are free.

    Args:
        free_devices: None on CPUs, where one job runs at a time.
    """
    if free_devices is None and running:
        return None
    unfinished = {job.run.name for job in (*due, *running) if job.kind == "train"}
    for job in due:
        if job.kind != "train" and job.run.name in unfinished:
            continue
        if free_devices is None or job.devices <= free_devices:
            return job
    return None


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code of the main rank if known, else of the process; negative for a signal."""
    complete: bool
    """True if the job's result exists."""
    progressed: bool
    """True if the job saved a new checkpoint."""
    stopping: bool
    """True if the study had requested a stop."""
    monitor_stop: bool = False
    """True if the monitor stopped the run at a spike."""
    error: str = ""
    """Result of `reason_in` for the job's output."""


@dataclass(frozen=True)
class Verdict:
    what: str
    """`finished`, `again` (start it again now), `interrupted` (the next start of the study goes on), or `failed`."""
    reason: str = ""


def judge(ended: Ended) -> Verdict:
    code, said = ended.code, f": {ended.error}" if ended.error else ""
    if ended.complete:
        return Verdict("finished")
    if ended.monitor_stop or code == exit_codes.STOPPED_BY_MONITOR:
        return Verdict("failed", f"diverged: the monitor stopped it at a spike{said}")
    if code == exit_codes.REFUSED:
        return Verdict("failed", f"refused, exit code {code}{said}")
    if code == exit_codes.SAVE_FAILED:
        return Verdict("failed", f"checkpoints cannot be written, exit code {code}{said}")
    if ended.stopping:  # torchrun ends with 1 in any case
        return Verdict("interrupted", "stopped")
    stopped = code == exit_codes.STOPPED
    how = f"killed by {reason_in_words(-code)}" if code < 0 else "stopped" if stopped else f"exit code {code}"
    if ended.progressed:
        return Verdict("again", f"{how} after a new checkpoint")
    if stopped or code < 0:
        return Verdict("interrupted", f"{how} before a new checkpoint")
    if code == 0:
        return Verdict("failed", "it ended with exit code 0 and left no result")
    return Verdict("failed", f"exit code {code}{said}")
