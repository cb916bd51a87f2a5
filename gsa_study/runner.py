"""Run the jobs of a study, one at a time or in parallel, until all jobs have ended or a stop is requested."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from gsa_study import processes
from gsa_study.jobs import Job
from gsa_study.plan import StudyError, judge, next_job
from gsa_study.processes import Running, child_environment
from gsa_study.states import newest_checkpoint, note_failure, read_state
from gsa_train.files import NO_LOCKS, own_file
from gsa_train.reliability.stop_signals import heeded_signals, reason_in_words
from gsa_train.run_folder.paths import LOCK, MONITOR_STOP

POLL_SECONDS = 0.1

logger = logging.getLogger(__name__)


@dataclass
class StudyRunner:
    folder: Path
    due: list[Job]
    """Copy of the due jobs, in the order in which they start. Jobs that start are removed."""
    gpus: Sequence[str] | None
    """GPUs, or None for CPUs, where one job runs at a time."""
    deadline: float | None = None
    """Time (`time.time`) at which running jobs are stopped."""
    interrupted: list[tuple[Job, str]] = field(default_factory=list)
    stop_reason: str = ""
    killed: bool = False
    """True after a second Ctrl-C."""

    def __post_init__(self) -> None:
        self.due = list(self.due)
        self._running: list[Running] = []
        self._free = list(self.gpus or [])
        self._signals = 0
        self._told = False
        self._waited_for: list[Job] = []

    def run(self) -> None:
        before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        try:
            while True:
                self._heed()
                is_waiting = self._start_all()
                if not self._running and not is_waiting:
                    break
                time.sleep(POLL_SECONDS)
                self._collect()
        finally:
            for each in self._running:  # after our own error, such as a full disk: leave no job unwatched
                each.process.send_signal(signal.SIGTERM)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_all(self) -> bool:
        """Start the jobs that can start now. Return True if the next job must wait because another process is still
        writing to the job's run folder. After a study is killed, its runs may still be saving checkpoints."""
        while not self.stop_reason:
            free = None if self.gpus is None else len(self._free)
            job = next_job(self.due, [each.job for each in self._running], free)
            if job is None:
                return False
            if is_locked(job.run.folder / LOCK):
                if job not in self._waited_for:
                    self._waited_for.append(job)
                    say(f"{job.key}: waits for the process that writes {job.run.folder}")
                return True
            self._start(job)
        return False

    def _start(self, job: Job) -> None:
        self.due.remove(job)
        gpus = tuple(self._free[: job.devices])
        del self._free[: job.devices]
        name = job.key.replace(" ", "_")
        notes, log = self.folder / "starts" / name, self.folder / "logs" / f"{name}.log"
        for folder in (notes, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        (notes / "exit_code").unlink(missing_ok=True)
        environment = child_environment(os.environ, gpus, notes)
        where = f" on GPU {', '.join(gpus)}" if gpus else ""
        say(f"{job.key}: started{where}; its output is in {log}")
        before = newest_checkpoint(job.run.folder), log.stat().st_size if log.exists() else 0
        process = processes.start_process(job.command, environment, log)
        self._running.append(Running(job, process, gpus, log, notes, *before))

    def _collect(self) -> None:
        for each in list(self._running):
            code = each.exit_code()
            if code is None:
                continue
            self._running.remove(each)
            self._free += each.gpus
            job = each.job
            what, reason = judge(
                code,
                complete=read_state(job).finished,
                progressed=newest_checkpoint(job.run.folder) not in ("", each.checkpoint_before),
                stopping=bool(self.stop_reason),
                monitor_stop=(job.run.folder / MONITOR_STOP).exists(),
                error=each.reason(code),
            )
            say(f"{job.key}: {what}{f' ({reason})' if reason else ''}")
            if what == "again":
                self.due.insert(0, job)
            if what == "failed":
                note_failure(self.folder, job.key, reason)
            if what == "interrupted":
                self.interrupted.append((job, reason))
            if what in ("failed", "interrupted") and job.kind == "train":
                self.due = [due for due in self.due if due.kind == "train" or due.run.name != job.run.name]

    # ---- stops

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self.stop_reason = self.stop_reason or reason_in_words(number)

    def _heed(self) -> None:
        if self.deadline is not None and time.time() >= self.deadline and not self.stop_reason:
            self.stop_reason = "the time limit"
        if self.stop_reason and not self._told:
            self._told = True
            hint = "; Ctrl-C again ends them at once" if self._running else ""
            say(f"stopped by {self.stop_reason}: what is under way saves and ends{hint}")
            for each in self._running:
                each.process.send_signal(signal.SIGTERM)
        elif self._signals > 1 and not self.killed:
            self.killed = True
            say("stopped again: ended at once; the same command goes on from the last checkpoints")
            for each in self._running:
                each.kill()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def lock_study(folder: Path) -> IO[str]:
    """Lock the study's folder until this process ends, or the file is closed.

    Raises:
        StudyError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "lock", "a+", encoding="utf-8", opener=own_file)  # noqa: SIM115 (the caller's)
    if not try_lock(file):
        file.close()
        raise StudyError(
            f"another process runs the study in {folder}; wait for it, or give this one another name"
        )
    return file


def try_lock(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s: no locks on this file system (%s); start nothing twice there", file.name, error)
    return True


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with open(path, "a+", encoding="utf-8", opener=own_file) as file:
        return not try_lock(file)
