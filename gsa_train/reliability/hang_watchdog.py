"""Detect a hang, report the rank that caused it, and end all ranks.

A thread of each rank writes heartbeats to the torch.distributed store. A heartbeat has a counter and the activity of
the main thread. The first and the last rank read the heartbeats of all ranks.

If a rank makes no progress within the limit (hang_limit.py), rank 0 writes a report and sends an alert through W&B. If
rank 0 is frozen, the last rank writes the report. Every rank that still runs writes its stacks. Then all ranks end with
exit code 1, and torchrun or Slurm restarts them from the last checkpoint. The next start also sends the alert, because
only rank 0 can send alerts, and rank 0 may have hung.

At the end of a run, the store may be gone once any rank has exited. Each rank therefore limits its own time to leave
the process group. A rank that exceeds this limit, for example because a peer died, ends with the run's exit code.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil
import torch.distributed as dist

from gsa_train.config import PhaseConfig
from gsa_train.distributed.store import connect_to_store
from gsa_train.files import own_file
from gsa_train.process.console import drain_console
from gsa_train.process.exit_codes import FAILED
from gsa_train.reliability.hang_limit import ACTIVITIES, SILENT, STEP, StepLimit
from gsa_train.reliability.last_words import tell_torchrun
from gsa_train.reliability.stop_signals import launchers_patience
from gsa_train.services import Service, StepPlan

LATE_SHARE = 0.2
"""A process may be frozen if its heartbeat is older than this share of the limit."""
LONGEST_BEAT_SECONDS = 5.0
ALERT_SECONDS = 20.0
"""Longest wait for W&B to send an alert, and for a report or stacks, because the file system may hang."""
ORPHAN_SECONDS = 0.5
"""Time from the end of torchrun's connections to the end of its process."""
REPORT = "report.txt"
ALL_SAFE = "the run was over, and its newest checkpoint is safe"
NAMED = re.compile(r"rank \d+ on \S+ \(process .*(?= <--$)", re.MULTILINE)
"""Matches what a report says about a rank that holds up the others."""


class Beat(NamedTuple):
    number: int
    """Number of heartbeats, which does not change while the whole process is frozen."""
    progress: int
    """Number of calls of `heartbeat` by the main thread."""
    step: int
    activity: int
    host: str
    pid: int
    step_limit_seconds: float
    """The rank's current limit of a step."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.activity


@dataclass
class Age:
    """Holds the seconds, by the reader's clock, since a rank's heartbeat and its main thread's progress changed."""

    beat: Beat
    of_beat: float = 0.0
    of_progress: float = 0.0

    def see(self, beat: Beat, elapsed: float) -> None:
        self.of_beat = 0.0 if beat.number != self.beat.number else self.of_beat + elapsed
        self.of_progress = 0.0 if beat.progress != self.beat.progress else self.of_progress + elapsed
        self.beat = beat


def is_frozen(age: Age, timeout_seconds: float) -> bool:
    """Returns whether heartbeat and progress have stood still for half the limit."""
    return min(age.of_progress, age.of_beat) >= timeout_seconds / 2


def limit_for_all(ages: list[Age], longest_seconds: float) -> float:
    """Returns the limit for all ranks. If a process sends no heartbeat within its own step limit, this step limit
    applies, except in SILENT activities, which may block heartbeats. Otherwise, the largest step limit applies if all
    ranks are in a step, else `longest_seconds`."""
    frozen = [
        age.beat.step_limit_seconds
        for age in ages
        if ACTIVITIES[age.beat.activity] not in SILENT
        and min(age.of_progress, age.of_beat) >= age.beat.step_limit_seconds
    ]
    if frozen:
        return min(frozen)
    steps = [ACTIVITIES[age.beat.activity] == STEP for age in ages]
    return max(age.beat.step_limit_seconds for age in ages) if all(steps) else longest_seconds


def find_fault(ages: list[Age], timeout_seconds: float) -> str | None:
    """Returns a report, or None if there is no hang. The report gives every rank's place and names the ranks that hold
    up the run. They may differ from the rank that exceeds the limit, which may only be waiting. If a heartbeat is late,
    the report waits until a process counts as frozen, for at most 1.5 limits."""
    longest = max(age.of_progress for age in ages)
    if longest < timeout_seconds:
        return None
    frozen = [rank for rank, age in enumerate(ages) if is_frozen(age, timeout_seconds)]
    is_late = any(age.of_beat >= LATE_SHARE * timeout_seconds for age in ages)
    if is_late and not frozen and longest < 1.5 * timeout_seconds:
        return None
    earliest = min(age.beat.place for age in ages)
    if frozen:
        named, what = frozen, "frozen or gone (not even a heartbeat)"
    elif any(age.beat.place != earliest for age in ages):
        named = [rank for rank, age in enumerate(ages) if age.beat.place == earliest]
        what = "all others wait for"
    else:
        named = list(range(len(ages)))
        what = "all at the same place, in a collective, a kernel or a slow file system: compare their stacks"
    lines = [f"no progress for {timeout_seconds:.0f} s. {what.capitalize()}: {', '.join(map(str, named))}"]
    for rank, age in enumerate(ages):
        lines.append(f"  {_where(rank, age)}{' <--' if rank in named else ''}")
    if ACTIVITIES[min(age.beat.activity for age in ages)] == "ending":
        lines.append(f"  {ALL_SAFE}")
    return "\n".join(lines)


def _where(rank: int, age: Age) -> str:
    beat = age.beat
    return (
        f"rank {rank} on {beat.host} (process {beat.pid}): {ACTIVITIES[beat.activity]} after step {beat.step}, "
        f"for {age.of_progress:.0f} s; heartbeat {age.of_beat:.0f} s ago"
    )


def in_short(report: str) -> str:
    """Returns the first line of a report, and its lines about the ranks that hold up the others."""
    return "; ".join([report.splitlines()[0], *NAMED.findall(report)])


def newest_hang(folder: Path, since_unix_seconds: float) -> str | None:
    """Returns, in short, the newest report of a hang since `since_unix_seconds` in a run's `faults` folder, or None."""
    reports = [path for path in folder.glob(f"*/{REPORT}") if path.stat().st_mtime >= since_unix_seconds]
    texts = [path.read_text(errors="replace") for path in sorted(reports)]
    hangs = [text for text in texts if NAMED.search(text)]  # other reports are about corruption
    return in_short(hangs[-1]) if hangs else None


class HangWatchdog(Service):
    """Writes the heartbeat of this rank. The first and the last rank also read all heartbeats."""

    def __init__(self, rank: int, world_size: int, limit: StepLimit, folder: Path, step: int) -> None:
        """Starts the thread. Collective.

        Args:
            limit: longest time without progress.
            folder: folder for reports and stacks; created with the first one.
        """
        self.on_hang: Callable[[int, str], None] | None = None
        """Called with step and short report if this rank finds a hang; in its own thread, for ALERT_SECONDS at most."""
        self.on_beat: Callable[[int, float], None] | None = None
        """Called at each heartbeat with the number of steps and the time of the main thread's last progress
        (`time.monotonic`). Calls run one at a time in their own thread, so a slow file system delays no heartbeat."""
        self.on_orphaned: Callable[[], None] | None = None
        """Called if torchrun has ended, as by a signal that it does not handle. Requests a stop, so that ranks save and
        end."""
        self.exit_code = FAILED
        """Exit code of a rank that the watchdog ends."""
        self._last_stretch: threading.Timer | None = None
        self._telling: threading.Thread | None = None
        self._rank, self._world_size, self._folder = rank, world_size, folder
        self._limit, self._timeout_seconds = limit, limit.longest_seconds
        self._interval = min(LONGEST_BEAT_SECONDS, limit.interval_seconds)
        self._store = connect_to_store("watch", timedelta(seconds=limit.longest_seconds))
        self._host, self._launcher = socket.gethostname(), os.getppid()
        self._count = self._progress = 0
        self._ages: list[Age] = []
        self._place = (step, 0)
        self._progress_at = time.monotonic()
        self._step_seconds = 0.0
        """Time of the current step so far, without logging."""
        self._compiles = False
        self._known_kinds: set[tuple[bool, bool]] = set()
        """Kinds of steps that this process has begun in this phase."""
        self._over = threading.Event()
        self._beat()
        dist.barrier()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def heartbeat(self, step: int, activity: str) -> None:
        """Record progress of the main thread: it begins `activity` after `step` steps."""
        now, (of_step, before) = time.monotonic(), self._place
        if ACTIVITIES[before] == STEP:
            self._step_seconds += now - self._progress_at
        if step != of_step and self._step_seconds > 0:
            self._limit.add(self._step_seconds)
            self._step_seconds = 0.0
        self._place = (step, ACTIVITIES.index(activity))
        self._progress_at, self._compiles = now, False
        self._progress += 1

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        """Forget the step times, because steps of this phase may take much longer."""
        self._limit.forget()
        self._step_seconds = 0.0
        self._known_kinds.clear()

    def before_step(self, plan: StepPlan) -> None:
        self.heartbeat(plan.step - 1, "reading text")

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        """Begin `compiling` at the first step of each kind in a phase, else `training`."""
        kind = plan.logs, plan.weights_are_kept
        self.heartbeat(plan.step - 1, "training" if kind in self._known_kinds else "compiling")
        self._known_kinds.add(kind)

    def on_save(self, step: int) -> None:
        self.heartbeat(step, "saving")

    def end_phase(self, step: int) -> None:
        """Begin `starting` before the next phase or the end of the run."""
        self.heartbeat(step, "starting")

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        step, before = self._place
        self.heartbeat(step, activity)
        yield
        self.heartbeat(step, ACTIVITIES[before])

    def compiling(self, begins: bool) -> None:
        """Record that compilation of a kernel begins or ends. Meanwhile the longest limit applies to the step."""
        step, activity = self._place
        if begins and ACTIVITIES[activity] == STEP:
            self.heartbeat(step, "compiling")
            self._compiles = True
        elif not begins and self._compiles:
            self.heartbeat(step, STEP)

    def begin_to_leave(self) -> None:
        """Stop using the store, and limit the time that this rank takes to leave its process group. All ranks must call
        this before any rank exits, because the store may end with that rank."""
        self._last_stretch = threading.Timer(self._timeout_seconds, self._end_leaving)
        self._last_stretch.daemon = True
        self._last_stretch.start()
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        if self._last_stretch is not None:
            self._last_stretch.cancel()

    def _end_leaving(self) -> None:
        folder = self._folder / time.strftime("%Y%m%d-%H%M%S")
        self._write_stacks(folder)
        limit = f"{self._timeout_seconds:g} s"
        self.end_saved(f"it could not leave its process group within {limit}; a peer hangs; stacks: {folder}")

    def end_saved(self, why: str) -> NoReturn:
        """End this process at once with the run's exit code. The run must be saved."""
        self._end(f"{why}; {ALL_SAFE}")

    def _beat(self) -> None:
        limit_seconds = self._limit.seconds
        beat = Beat(self._count, self._progress, *self._place, self._host, os.getpid(), limit_seconds)
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        self._count += 1
        if self.on_beat is not None and (self._telling is None or not self._telling.is_alive()):
            place = self._place[0], self._progress_at
            self._telling = threading.Thread(target=self.on_beat, args=place, name="tell", daemon=True)
            with suppress(RuntimeError):  # The limit of threads is reached: the next beat tries again.
                self._telling.start()

    def _run(self) -> None:
        try:
            self._watch()
        except (RuntimeError, OSError) as error:
            if not self._over.wait(ORPHAN_SECONDS) and self._is_orphaned():
                self._end_orphaned()  # torchrun held the store
            if not self._over.is_set():
                what = f"the store of torch.distributed does not answer ({error}): rank 0 or its node is frozen or gone"
                if self._ages and self._rank == self._world_size - 1:
                    self._write_report(f"{what}\n  {_where(0, self._ages[0])} <--")
                self._end(what)

    def _watch(self) -> None:
        reads = self._rank in (0, self._world_size - 1)
        last = time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            # Bound the elapsed time, because this process may itself have been suspended.
            elapsed, last = min(now - last, 2 * self._interval), now
            if self._is_orphaned():
                self._end_orphaned()
                return
            self._beat()
            if self._store.check(["fault"]):
                self._dump_and_end()
            if reads:
                beats = self._store.multi_get([f"beat/{rank}" for rank in range(self._world_size)])
                found = [Beat(*json.loads(beat)) for beat in beats]
                self._ages = self._ages or [Age(beat) for beat in found]
                for age, beat in zip(self._ages, found, strict=True):
                    age.see(beat, elapsed)
                limit_seconds = limit_for_all(self._ages, self._limit.longest_seconds)
                fault = find_fault(self._ages, limit_seconds)
                frozen = [age.beat for age in self._ages if is_frozen(age, limit_seconds)]
                if fault and (self._rank == 0 or is_frozen(self._ages[0], limit_seconds)):
                    self._report(fault, frozen)

    def _is_orphaned(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._launcher

    def _end_orphaned(self) -> None:
        """Request a stop, then end this process unless the main thread begins to leave in time."""
        if self.on_orphaned is not None:
            self.on_orphaned()
        if self.on_orphaned is None or not self._over.wait(launchers_patience()):
            self._end("torchrun is gone, and with it who would end this rank")

    def _report(self, fault: str, frozen: list[Beat]) -> None:
        name = self._write_report(fault)
        if self.on_hang is not None:  # first, because this process ends soon after the others
            _for_a_while(self.on_hang, self._place[0], in_short(fault))
        self._store.set("fault", json.dumps([name, frozen]))

    def _write_report(self, fault: str) -> str:
        name = time.strftime("%Y%m%d-%H%M%S")
        folder = self._folder / name
        text = f"rank {self._rank}: {fault}\nstacks of all ranks: {folder}\n"
        _say(text)
        self._write("report", folder / REPORT, lambda file: file.write(text))
        return name

    def _dump_and_end(self) -> None:
        name, frozen = json.loads(self._store.get("fault"))
        folder = self._folder / name
        self._write_stacks(folder)
        for each in (Beat(*beat) for beat in frozen):  # kill them: torchrun would wait half a minute for them
            if each.host == self._host and each.pid != os.getpid() and psutil.pid_exists(each.pid):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(2 * self._interval)  # torchrun ends all ranks once one has ended
        self._end(f"the run hangs; stacks: {folder}")

    def _write_stacks(self, folder: Path) -> None:
        self._write("stacks", folder / f"rank_{self._rank:05d}.txt", faulthandler.dump_traceback)

    def _write(self, what: str, path: Path, write: Callable[[Any], object]) -> None:
        def try_to_write() -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)  # missing if the nodes share no file system
                with open(path, "w", opener=own_file) as file:
                    write(file)
            except OSError as error:  # A full disk must not keep the ranks from ending.
                _say(f"rank {self._rank}: no {what}: {error}\n")

        _for_a_while(try_to_write)

    def _end(self, why: str) -> NoReturn:
        """End this process and its children at once, because the main thread may never handle an exception."""
        try:
            said = f"rank {self._rank} on {self._host} ends: {why}"
            _say(f"{said}\n")
            tell_torchrun(said)
            drain_console()
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # the child has just ended
                    child.kill()
        finally:  # nothing else ends this process
            os._exit(self.exit_code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)


def _for_a_while(call: Callable[..., None], *arguments: Any) -> None:
    """Call a function that may never return, in a thread, for ALERT_SECONDS at most."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(ALERT_SECONDS)
