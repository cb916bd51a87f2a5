"""Tests how long a rank may go without progress. During a step, the limit follows from the times of earlier steps.
Outside steps, the limit is longer."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gsa_train.config import ParallelConfig, PhaseConfig
from gsa_train.process.console import ConsoleWriter, console_stream
from gsa_train.reliability.hang_limit import (
    ACTIVITIES,
    FEWEST_STEPS,
    LEAST_SECONDS,
    RECENT_STEPS,
    TIMES_THE_SLOWEST,
    StepLimit,
    step_limit,
    watch_compilation,
)
from gsa_train.reliability.hang_watchdog import (
    ALL_SAFE,
    REPORT,
    Age,
    Beat,
    HangWatchdog,
    find_fault,
    limit_for_all,
)
from gsa_train.run import finish

LONGEST = 600.0
STEP_SECONDS = 40.0


def limit_after(*seconds: float) -> float:
    limit = StepLimit(LONGEST)
    for each in seconds:
        limit.add(each)
    return limit.seconds


def test_a_steps_limit_follows_the_slowest_of_the_recent_steps() -> None:
    assert limit_after(*[1.0] * (FEWEST_STEPS - 1)) == LONGEST  # too few steps
    assert limit_after(*[1.0] * FEWEST_STEPS) == LEAST_SECONDS
    assert limit_after(20.0, 12.0, 12.0) == TIMES_THE_SLOWEST * 20.0
    assert limit_after(20.0, *[12.0] * RECENT_STEPS) == TIMES_THE_SLOWEST * 12.0  # forgotten
    assert limit_after(300.0, 300.0, 300.0) == LONGEST


def test_steps_of_another_phase_have_a_limit_of_their_own(tmp_path, monkeypatch):
    """Steps of a new phase do other work, so the times of earlier steps do not predict their times."""
    watched = Watched(tmp_path, monkeypatch)
    watched.steps(FEWEST_STEPS + 1)
    assert watched.watch._limit.seconds == LEAST_SECONDS
    watched.watch.begin_phase(PhaseConfig(), 0)
    assert watched.watch._limit.seconds == LONGEST
    watched.watch.close()


def test_a_step_counts_once_however_often_it_is_logged(tmp_path, monkeypatch):
    """A step with several records must not fill the history of step times."""
    watched = Watched(tmp_path, monkeypatch, running=False)
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for step in range(RECENT_STEPS):
        watched.watch.heartbeat(step, "reading text")
        clock += 100
        watched.watch.heartbeat(step, "training")
        clock += 20 if step == 0 else 2
        for _ in range(3):
            with watched.watch.during("logging"):
                clock += 50
            clock += 1
        assert watched.watch._limit.seconds == (LONGEST if step < FEWEST_STEPS else 5 * 23)
    for step in range(RECENT_STEPS, RECENT_STEPS + 2):
        watched.watch.heartbeat(step, "reading text")
        watched.watch.heartbeat(step, "training")
        clock += 2
    assert watched.watch._limit.seconds == LEAST_SECONDS


def test_a_fixed_limit_follows_nothing() -> None:
    limit = step_limit(ParallelConfig(timeout_minutes=10, hang_limit_seconds=25))
    assert limit.seconds == 25
    for _ in range(RECENT_STEPS):
        limit.add(100.0)
    assert limit.seconds == 25
    assert step_limit(ParallelConfig(timeout_minutes=0.25, hang_limit_seconds=25)).seconds == 15
    assert step_limit(ParallelConfig()).longest_seconds == LONGEST
    # ranks are looked at often enough for the shortest limit
    assert StepLimit(LONGEST).interval_seconds == LEAST_SECONDS / 20
    assert StepLimit(LONGEST, fixed_seconds=10).interval_seconds == 0.5


def age(activity: str, silent: float = 0.0, still: float = 50.0, limit: float = STEP_SECONDS) -> Age:
    """Return `silent` seconds without a heartbeat, and `still` seconds without progress."""
    return Age(Beat(1, 1, 7, ACTIVITIES.index(activity), "node", 100, limit), silent, still)


def test_only_steps_have_the_steps_limit_and_who_waits_for_another_activity_has_its_time() -> None:
    assert limit_for_all([age("training"), age("training")], LONGEST) == STEP_SECONDS
    assert limit_for_all([age("training"), age("training", limit=LONGEST)], LONGEST) == LONGEST
    for activity in set(ACTIVITIES) - {"training"}:
        ages = [age(activity), age("training")]
        assert limit_for_all(ages, LONGEST) == LONGEST
        assert find_fault(ages, limit_for_all(ages, LONGEST)) is None


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_a_silent_process_is_frozen_whatever_it_did(activity: str) -> None:
    """Three activities are exceptions, because one call may block all threads or others may wait outside of steps."""
    ages = [age("saving"), age(activity, silent=STEP_SECONDS + 1), age("validating")]
    limit = limit_for_all(ages, LONGEST)
    if activity in ("starting", "compiling", "ending"):
        assert limit == LONGEST
        return
    assert limit == STEP_SECONDS
    fault = find_fault(ages, limit)
    assert "Frozen or gone (not even a heartbeat): 1" in fault
    late = [age("saving"), age(activity, silent=STEP_SECONDS - 1), age("validating")]
    assert limit_for_all(late, LONGEST) == LONGEST
    alive = [age("saving"), age(activity, silent=STEP_SECONDS + 1, still=1), age("validating")]
    assert limit_for_all(alive, LONGEST) == LONGEST  # its heartbeat is lost, but it works


class Watched:
    """Holds a HangWatchdog that sets `found` at a hang instead of ending the process. If `running` is False, the thread
    of the watchdog does not run, and tests call the methods of the watchdog themselves."""

    def __init__(self, folder: Path, monkeypatch: Any, running: bool = True, **limits: float) -> None:
        self.found = threading.Event()
        self.looks = 0
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr(HangWatchdog, "_dump_and_end", lambda watch: watch._over.set())
        monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_, **__: None)
        monkeypatch.setattr("torch.distributed.barrier", lambda: None)
        self.folder = folder
        self.watch = HangWatchdog(0, 1, StepLimit(LONGEST, **limits), folder, step=0)
        self.watch.on_hang = lambda *_: self.found.set()
        self.watch.on_beat = self._count
        if not running:
            self.watch.close()

    def _count(self, step: int, progress: float) -> None:
        self.looks += 1

    def steps(self, count: int) -> None:
        for step in range(count):
            self.watch.heartbeat(step, "reading text")
            self.watch.heartbeat(step, "training")

    def look(self, times: int) -> None:
        """Wait until the watch has looked this often, or has found a hang."""
        before = self.looks
        while self.looks < before + times and not self.found.is_set():
            self.found.wait(0.01)


def test_a_hang_in_a_step_is_found_and_a_slow_validation_is_none(tmp_path, monkeypatch):
    least = 0.2
    watched = Watched(tmp_path, monkeypatch, least_seconds=least)
    times = 5 * 20  # five limits of a step, at 20 looks in each
    watched.steps(5)
    for activity in ("compiling", "logging", "validating", "scoring tasks", "saving", "reading text"):
        watched.watch.heartbeat(5, activity)
        watched.look(times // 3)
    with watched.watch.during("validating"):
        watched.look(times)
    assert not watched.found.is_set()
    assert not list(tmp_path.iterdir())

    watched.watch.heartbeat(5, "training")
    watched.look(times)
    assert watched.found.wait(100)
    watched.watch.close()
    (report,) = tmp_path.glob(f"*/{REPORT}")
    assert "no progress for 0 s. All at the same place" in report.read_text()
    assert "training after step 5" in report.read_text()


def test_a_kernel_that_is_compiled_within_a_step_is_no_hang(tmp_path, monkeypatch):
    """Triton reports the compilation, from any thread."""
    hooks = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    knobs: Any = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs, "runtime", hooks)
    watched = Watched(tmp_path, monkeypatch, least_seconds=0.2)
    watch_compilation(watched.watch.compiling)
    watched.steps(5)
    names = dict.fromkeys(("key", "repr", "fn", "compile", "is_manual_warmup", "already_compiled"))
    assert not hooks.jit_cache_hook(**names)  # True would keep Triton from compiling
    watched.look(100)
    assert not watched.found.is_set()
    assert ACTIVITIES[watched.watch._place[1]] == "compiling"
    hooks.jit_post_compile_hook(**names)
    assert ACTIVITIES[watched.watch._place[1]] == "training"
    watched.look(100)
    assert watched.found.wait(100)
    watched.watch.close()

    watched.watch.heartbeat(5, "validating")  # it has its own time
    hooks.jit_cache_hook(**names)
    hooks.jit_post_compile_hook(**names)
    assert ACTIVITIES[watched.watch._place[1]] == "validating"


def test_a_file_system_that_stands_still_keeps_no_heartbeat_back(tmp_path, monkeypatch):
    """Without a heartbeat the writing rank would count as frozen within the time of a step."""
    watched = Watched(tmp_path, monkeypatch, running=False)
    comes_back, told = threading.Event(), []

    def write(step: int, progress: float) -> None:
        told.append(step)
        comes_back.wait(60)

    watched.watch.on_beat = write
    before = watched.watch._count
    for _ in range(3):
        watched.watch._beat()
    assert watched.watch._count == before + 3
    assert told == [0]
    comes_back.set()
    watched.watch._telling.join()
    watched.watch._beat()
    watched.watch._telling.join()
    assert told == [0, 0]


def break_pipe(_descriptor: int, _text: bytes) -> int:
    raise BrokenPipeError


@pytest.mark.parametrize("fault", ["stderr of a pipe that is gone", "stderr hangs", "report folder hangs"])
def test_nothing_that_hangs_or_has_ended_keeps_a_rank_from_ending(fault, tmp_path, monkeypatch):
    """If torchrun is gone, the reader of its pipe may be gone too. Nothing else then ends the rank."""
    watched = Watched(tmp_path, monkeypatch, running=False)
    comes_back = threading.Event()
    codes, killed = list[int](), list[int]()

    def hang(*words: Any, **_: Any) -> int:
        comes_back.wait(60)
        return len(words[-1])

    def ended() -> None:
        raise psutil.NoSuchProcess(1)

    children = [SimpleNamespace(kill=ended), SimpleNamespace(kill=lambda: killed.append(2))]
    monkeypatch.setattr("gsa_train.reliability.hang_watchdog.ALERT_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        if fault == "report folder hangs":
            patched.setattr(Path, "mkdir", lambda *_, **__: comes_back.wait(60))
        write = {"stderr of a pipe that is gone": break_pipe, "stderr hangs": hang}.get(fault, os.write)
        writer = ConsoleWriter(2, write)
        patched.setattr("sys.stderr", console_stream(2, writer, "utf-8"))
        patched.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: children))
        patched.setattr(os, "_exit", codes.append)
        watched.watch._write_report("a fault")
        watched.watch._end("torchrun is gone")
        assert not comes_back.is_set()
        comes_back.set()
    assert (codes, killed) == ([1], [2])
    for thread in threading.enumerate():  # the wait for the report's writer was no longer than for stderr
        if thread.daemon and thread.name.endswith("(write)"):
            thread.join(60)
    assert fault == "report folder hangs" or list(tmp_path.glob(f"*/{REPORT}"))


@pytest.mark.parametrize("saves_in_time", [True, False])
def test_where_torchrun_is_gone_a_rank_is_asked_to_save_and_ended(saves_in_time, tmp_path, monkeypatch):
    watch = Watched(tmp_path, monkeypatch, running=False).watch
    watch._over.clear()
    codes = list[int]()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    assert not watch._is_orphaned()
    watch._launcher = os.getpid()
    assert watch._is_orphaned()
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0" if not saves_in_time else "60")
    watch.on_orphaned = watch._over.set if saves_in_time else lambda: None
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: []))
    watch._end_orphaned()
    assert codes == ([] if saves_in_time else [1])


@pytest.mark.parametrize("dies", [False, True], ids=["hangs", "dies"])
def test_a_peer_that_is_lost_between_the_last_barriers_costs_no_exit_code(
    dies, tmp_path, monkeypatch, capsys
):
    watch, over, codes = Watched(tmp_path, monkeypatch).watch, threading.Event(), list[int]()
    watch._timeout_seconds, watch.exit_code = 60 if dies else 0.05, 75

    def without_peer() -> None:
        if dies:
            raise RuntimeError("connection closed")
        assert over.wait(60)

    barriers = iter([lambda: None, without_peer])
    monkeypatch.setattr("torch.distributed.barrier", lambda: next(barriers)())
    monkeypatch.setattr(finish, "shutdown_parallel", lambda: None)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: []))
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or over.set())
    finish.leave_world(watch)
    assert codes == [75]
    said = capsys.readouterr().err
    assert (
        "has died (connection closed)" if dies else "could not leave its process group within 0.05 s"
    ) in said
    assert said.endswith(f"; {ALL_SAFE}\n")
    assert dies or "leave_world" in next(tmp_path.glob("*/rank_00000.txt")).read_text()
