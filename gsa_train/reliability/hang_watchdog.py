"""A run that hangs ends by itself, and says which rank it was and where every rank stood.

A thread of each rank writes a heartbeat into torch.distributed's store: that the process lives, and what its main
thread does. Rank 0 reads them (the last rank does if rank 0 itself is frozen). Where ranks show no progress for longer
than any of them may (hang_limit.py), it writes a report, W&B alerts, and every rank that still can writes its stacks;
then all end with exit code 1, and torchrun or Slurm starts them again from the last checkpoint. That start says so,
too: rank 0, which holds W&B, may have been the one that hung.

At the very end the first rank to go may take the store along. There each rank has only its own clock: one that is kept
from leaving, as by a peer that died on the way out, says so and ends with the exit code that the run has.
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
import uuid
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
"""Of the limit: without a heartbeat for so long, a process may be frozen."""
LONGEST_BEAT_SECONDS = 5.0
ALERT_SECONDS = 20.0
"""For W&B to send its alert, while all ranks hang anyway; and for a report or stacks, where the file system may be what
hangs."""
ORPHAN_SECONDS = 0.5
"""From the end of torchrun's connections to its own."""
REPORT = "report.txt"
ALL_SAFE = "the run was over, and its newest checkpoint is safe"
NAMED = re.compile(r"rank \d+ on \S+ \(process .*(?= <--$)", re.MULTILINE)
"""A rank in a report that holds up the others."""


class Beat(NamedTuple):
    number: int
    """Of heartbeats: stands still where the whole process does."""
    progress: int
    """Of notes by the main thread."""
    step: int
    activity: int
    host: str
    pid: int
    step_limit_seconds: float
    """What it allows a step now."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.activity


@dataclass
class Age:
    """Seconds since a rank's heartbeat changed, and since its main thread went on; by the reader's clock."""

    beat: Beat
    of_beat: float = 0.0
    of_progress: float = 0.0

    def see(self, beat: Beat, elapsed: float) -> None:
        self.of_beat = 0.0 if beat.number != self.beat.number else self.of_beat + elapsed
        self.of_progress = 0.0 if beat.progress != self.beat.progress else self.of_progress + elapsed
        self.beat = beat


def is_frozen(age: Age, timeout_seconds: float) -> bool:
    """Half the time is enough: it is asked only where some rank shows no progress for the whole."""
    return min(age.of_progress, age.of_beat) >= timeout_seconds / 2


def limit_for_all(ages: list[Age], longest_seconds: float) -> float:
    """How long ranks may show no progress: as long as the slowest activity may take, as the others wait for it. But a
    process that is silent for longer than a step may take is frozen, whatever it did."""
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
    """Which ranks hold up the run, with the place of every rank; None where all go on.

    A rank that waits may have begun to before the one that it waits for stood still: all are judged once one has made
    no progress for the whole time. While a heartbeat is late, the report waits until it comes or the process counts as
    frozen.
    """
    longest = max(age.of_progress for age in ages)
    if longest < timeout_seconds:
        return None
    frozen = [rank for rank, age in enumerate(ages) if is_frozen(age, timeout_seconds)]
    is_late = any(age.of_beat >= LATE_SHARE * timeout_seconds for age in ages)
    if is_late and not frozen and longest < 1.5 * timeout_seconds:
        return None
    behind = min(age.beat.place for age in ages)
    if frozen:
        named, what = frozen, "frozen or gone (not even a heartbeat)"
    elif any(age.beat.place != behind for age in ages):
        named = [rank for rank, age in enumerate(ages) if age.beat.place == behind]
        what = "behind all others, which wait"
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
    """Its first line, and the lines of the ranks that hold up the others."""
    return "; ".join([report.splitlines()[0], *NAMED.findall(report)])


def newest_hang(folder: Path, since_unix_seconds: float) -> str | None:
    """The newest report of a hang in a run's folder of faults, in short; None where there is none since then."""
    reports = [path for path in folder.glob(f"*/{REPORT}") if path.stat().st_mtime >= since_unix_seconds]
    texts = [path.read_text(errors="replace") for path in sorted(reports)]
    hangs = [text for text in texts if NAMED.search(text)]  # others are of wrong bits
    return in_short(hangs[-1]) if hangs else None


class HangWatchdog(Service):
    """The heartbeat of this rank; on the first and the last rank also the reader of all."""

    def __init__(self, rank: int, world_size: int, limit: StepLimit, folder: Path, step: int) -> None:
        """Starts the thread. Collective.

        Args:
            limit: without progress.
            folder: for reports and stacks; made when there are any.
            step: done so far.
        """
        self.on_hang: Callable[[int, str], None] | None = None
        """Takes step and report in short where this rank finds a hang; in a thread of its own, and not for long."""
        self.on_beat: Callable[[int, float], None] | None = None
        """Takes steps done and when the main thread last went on (of `time.monotonic`), with each heartbeat. In its own
        thread, not while the last call is under way: it writes, and a file system that stands still is no frozen rank.
        """
        self.on_orphaned: Callable[[], None] | None = None
        """Asks for a stop where torchrun is gone, as by a signal that it does not handle: the ranks save, and end by
        themselves, within the time that torchrun would give them."""
        self.exit_code = FAILED
        """Of a rank that is ended here."""
        self._last_stretch: threading.Timer | None = None
        self._telling: threading.Thread | None = None
        self._rank, self._world_size, self._folder = rank, world_size, folder
        self._limit, self._timeout_seconds = limit, limit.longest_seconds
        self._interval = min(LONGEST_BEAT_SECONDS, limit.interval_seconds)
        # torchrun may keep its store over restarts, with what earlier ranks wrote.
        name: list[Any] = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        self._store = dist.PrefixStore(
            f"watch/{name[0]}", connect_to_store(timedelta(seconds=limit.longest_seconds))
        )
        self._host, self._launcher = socket.gethostname(), os.getppid()
        self._count = self._progress = 0
        self._ages: list[Age] = []
        self._place = (step, 0)
        self._progress_at = time.monotonic()
        self._step_seconds = 0.0
        """Of the step under way, in the parts that logs leave of it."""
        self._compiles = False
        self._known_kinds: set[tuple[bool, bool]] = set()
        """Of steps of this phase that this process has begun."""
        self._over = threading.Event()
        self._beat()
        dist.barrier()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def heartbeat(self, step: int, activity: str) -> None:
        """The main thread goes on: what it begins, after how many steps."""
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
        """Its steps may take much longer than steps of the phase before."""
        self._limit.forget()
        self._step_seconds = 0.0
        self._known_kinds.clear()

    def before_step(self, plan: StepPlan) -> None:
        self.heartbeat(plan.step - 1, "reading text")

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        """The first step of each kind in a phase compiles."""
        kind = plan.logs, plan.weights_are_kept
        self.heartbeat(plan.step - 1, "training" if kind in self._known_kinds else "compiling")
        self._known_kinds.add(kind)

    def on_save(self, step: int) -> None:
        self.heartbeat(step, "saving")

    def end_phase(self, step: int) -> None:
        """The next phase begins, or the end of the run."""
        self.heartbeat(step, "starting")

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """This, and then again what was before, after the same step."""
        step, before = self._place
        self.heartbeat(step, activity)
        yield
        self.heartbeat(step, ACTIVITIES[before])

    def compiling(self, begins: bool) -> None:
        """A kernel begins to be compiled, or is: for as long, a step has the time of what is no step."""
        step, activity = self._place
        if begins and ACTIVITIES[activity] == STEP:
            self.heartbeat(step, "compiling")
            self._compiles = True
        elif not begins and self._compiles:
            self.heartbeat(step, STEP)

    def begin_to_leave(self) -> None:
        """Ask the store no more, and let this rank leave within the time that every step has. No rank may leave before
        all have done this: the store may go with it."""
        self._last_stretch = threading.Timer(self._timeout_seconds, self._end_leaving)
        self._last_stretch.daemon = True
        self._last_stretch.start()
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()
        if self._last_stretch is not None:
            self._last_stretch.cancel()

    def _end_leaving(self) -> None:
        folder = self._folder / time.strftime("%Y%m%d-%H%M%S")
        _for_a_while(self._write_stacks, folder)
        limit = f"{self._timeout_seconds:g} s"
        self.end_saved(f"it could not leave its process group within {limit}; a peer hangs; stacks: {folder}")

    def end_saved(self, why: str) -> NoReturn:
        """At the end of the run: at once, with the run's exit code."""
        self._end(f"{why}; {ALL_SAFE}")

    def _beat(self) -> None:
        limit_seconds = self._limit.seconds
        beat = Beat(self._count, self._progress, *self._place, self._host, os.getpid(), limit_seconds)
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        self._count += 1
        if self.on_beat is not None and (self._telling is None or not self._telling.is_alive()):
            place = self._place[0], self._progress_at
            self._telling = threading.Thread(target=self.on_beat, args=place, name="tell", daemon=True)
            with suppress(
                RuntimeError
            ):  # of a process that may have no more threads: the next beat tries again
                self._telling.start()

    def _run(self) -> None:
        try:
            self._watch()
        except (RuntimeError, OSError) as error:
            if not self._over.wait(ORPHAN_SECONDS) and self._is_orphaned():
                self._end_orphaned()  # the store was torchrun's
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
            # Time in which this process was itself suspended says nothing about the others.
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
        """Returns when the main thread has begun to leave."""
        if self.on_orphaned is not None:
            self.on_orphaned()
        if self.on_orphaned is None or not self._over.wait(launchers_patience()):
            self._end("torchrun is gone, and with it who would end this rank")

    def _report(self, fault: str, frozen: list[Beat]) -> None:
        name = self._write_report(fault)
        if self.on_hang is not None:  # first: once the others end, so does this process
            _for_a_while(self.on_hang, self._place[0], in_short(fault))
        self._store.set("fault", json.dumps([name, frozen]))

    def _write_report(self, fault: str) -> str:
        """Returns the name of its folder."""
        name = time.strftime("%Y%m%d-%H%M%S")
        folder = self._folder / name
        text = f"rank {self._rank}: {fault}\nstacks of all ranks: {folder}\n"
        _say(text)

        def write() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / REPORT, "w", opener=own_file) as file:
                    file.write(text)
            except OSError as error:  # a full disk must not keep the ranks from ending
                _say(f"rank {self._rank}: no report: {error}\n")

        _for_a_while(write)
        return name

    def _dump_and_end(self) -> None:
        name, frozen = json.loads(self._store.get("fault"))
        folder = self._folder / name
        _for_a_while(self._write_stacks, folder)
        for each in (Beat(*beat) for beat in frozen):  # torchrun would wait half a minute for their answer
            if each.host == self._host and each.pid != os.getpid() and psutil.pid_exists(each.pid):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(2 * self._interval)  # the first to end makes torchrun end the others
        self._end(f"the run hangs; stacks: {folder}")

    def _write_stacks(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)  # where the nodes share no file system
            with open(folder / f"rank_{self._rank:05d}.txt", "w", opener=own_file) as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            _say(f"rank {self._rank}: no stacks: {error}\n")

    def _end(self, why: str) -> NoReturn:
        """At once, with all children: the main thread may never come back to see an exception."""
        try:
            said = f"rank {self._rank} on {self._host} ends: {why}"
            _say(f"{said}\n")
            tell_torchrun(said)
            drain_console()
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # it has just ended by itself
                    child.kill()
        finally:  # nothing else would end this process
            os._exit(self.exit_code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)


def _for_a_while(call: Callable[..., None], *arguments: Any) -> None:
    """What may not come back."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(ALERT_SECONDS)
