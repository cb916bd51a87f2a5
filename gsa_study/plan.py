"""Decide from the states of the jobs which jobs are finished, which run next, and which are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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

    finished: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)
    """Failed jobs with the reason. They are tried again only on request."""
    due: list[Job] = field(default_factory=list)
    """Jobs to start or continue; each run's training comes first."""
    blocked: list[Job] = field(default_factory=list)
    """Jobs that need a training that has failed or cannot run here."""
    without_checkpoint: list[Job] = field(default_factory=list)
    """Jobs that need a finished run's checkpoint, which is missing in this folder."""


def check_unchanged(states: Sequence[JobState]) -> None:
    """Check that no job began with another config or command than the study file now has.

    Args:
        states: states of all jobs, also of jobs that the user did not ask for, because the report covers all jobs.

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
                *(f"{_first_of(folders)}: {change}" for change, folders in changed.items()),
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
    plan = StudyPlan()
    without_training = {
        state.job.run.name
        for state in states
        if state.job.kind == "train" and not state.finished
        and state.job.key in failures and not retry_failed
    }  # fmt: skip
    for state in states:
        job, reason = state.job, failures.get(state.job.key)
        if state.finished:
            plan.finished.append(job)
        elif state.lacks_checkpoint:
            plan.without_checkpoint.append(job)
        elif reason is not None and not retry_failed:
            plan.failed.append((job, reason))
        elif job.kind != "train" and job.run.name in without_training:
            plan.blocked.append(job)
        else:
            plan.due.append(job)
    return plan


def _first_of(folders: Sequence[Path]) -> str:
    """Return only the first folder and the number of others, because a config change may affect every run of a
    study."""
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


def judge(
    code: int, *, complete: bool, progressed: bool, stopping: bool, monitor_stop: bool, error: str
) -> tuple[str, str]:
    """Returns what to do after a job has ended, and why: `finished`, `again` (start the job again now), `interrupted`
    (the next start of the study continues the job), or `failed`.

    Args:
        code: exit code of the main rank if known, else of the process; negative for a signal.
        complete: the job's result exists.
        progressed: the job saved a new checkpoint.
        stopping: the study had requested a stop.
        monitor_stop: the monitor stopped the run at a spike.
        error: result of `reason_in` for the job's output.
    """
    said = f": {error}" if error else ""
    if complete:
        return "finished", ""
    if monitor_stop or code == exit_codes.STOPPED_BY_MONITOR:
        return "failed", f"diverged: the monitor stopped it at a spike{said}"
    if code == exit_codes.REFUSED:
        return "failed", f"refused, exit code {code}{said}"
    if code == exit_codes.SAVE_FAILED:
        return "failed", f"checkpoints cannot be written, exit code {code}{said}"
    if stopping:  # torchrun ends with 1 in any case
        return "interrupted", "stopped"
    stopped = code == exit_codes.STOPPED
    how = f"killed by {reason_in_words(-code)}" if code < 0 else "stopped" if stopped else f"exit code {code}"
    if progressed:
        return "again", f"{how} after a new checkpoint"
    if stopped or code < 0:
        return "interrupted", f"{how} before a new checkpoint"
    if code == 0:
        return "failed", "it ended with exit code 0 and left no result"
    return "failed", f"exit code {code}{said}"
