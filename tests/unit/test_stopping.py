"""Tests what stops a run. All ranks must stop after the same step, and a stop during validation must lose nothing."""

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gsa_train import trainer
from gsa_train.checkpoint.load import read_run_state
from gsa_train.metrics import record
from gsa_train.reliability import stop_signals
from gsa_train.reliability.monitor.monitor import MonitorStop
from gsa_train.reliability.monitor.spikes import Verdict
from gsa_train.reliability.stop_signals import (
    ONE_PRESS_SECONDS,
    STOP_SIGNALS,
    TIME_LIMIT,
    Stopped,
    StopRequest,
    children_keep_running,
    find_deadline,
)
from gsa_train.reliability.stop_vote import StopVote
from gsa_train.run import validate
from gsa_train.services import StepPlan
from gsa_train.step import StepResult
from helpers.runs import numbers_of
from helpers.single_rank import SPARSE, single_rank
from helpers.text_runs import text_config, train_on_text

PHASE = dataclasses.replace(SPARSE, steps=4)


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request = StopRequest()
    request.listen()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


# --- who asks -------------------------------------------------------------------------------------------------


class Ended(Exception):
    """Replaces the end of this process."""


@pytest.fixture
def press(request_to_stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Send a signal to this process, `seconds` after the test began."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)

    def send(number: int, seconds: float) -> None:
        monkeypatch.setattr(stop_signals.time, "monotonic", lambda: seconds)
        request_to_stop._heed(number)

    return send


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])  # from the terminal; from torchrun
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_saves_and_a_second_one_ends_at_once(press, capfd, monkeypatch, rank, second):
    monkeypatch.setenv("RANK", rank)
    press(signal.SIGTERM, 0.0)  # does not count
    press(signal.SIGINT, 1.0)
    first = capfd.readouterr().err
    press(signal.SIGINT, 1.0 + ONE_PRESS_SECONDS / 2)  # from the process's parent, as from the terminal
    assert capfd.readouterr().err == ""
    with pytest.raises(Ended, match="130"):
        press(second, 1.0 + ONE_PRESS_SECONDS)
    last = capfd.readouterr().err
    if rank == "0":
        assert "interrupted: the step under way is finished and saved" in first
        assert "press Ctrl-C again to end at once" in first
        assert "the same command goes on from the last checkpoint" in last
    else:
        assert first == last == ""


BUSY = """
import hashlib, os, signal, time
from gsa_train.reliability.stop_signals import StopRequest
request = StopRequest()
request.watch()
request.listen()
if not (child := os.fork()):
    os.write(1, b"ready\\n")
    while True:
        time.sleep(1)
os.write(1, b"ready\\n")
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # no handler of Python's runs until it is over
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_busy_main_thread_keeps_no_one_waiting(second: int) -> None:
    """A forked child gets the same signals, but handles none."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Python 3.12 warns of a fork of several threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY]
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "ready\n"]
        os.killpg(process.pid, signal.SIGINT)
        assert "interrupted: " in process.stderr.readline() + process.stderr.readline()
        assert process.poll() is None
        while process.poll() is None:
            os.killpg(process.pid, second)  # until ONE_PRESS_SECONDS are over
            time.sleep(0.01)
        assert process.returncode == 130
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the child
    assert process.stderr.read().strip().startswith("interrupted again: ended at once")


def test_children_do_not_get_the_signals_and_this_process_gets_them_later(request_to_stop):
    show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with children_keep_running():
        child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
        # The signal goes to this thread; otherwise a thread of an earlier test could receive it.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert request_to_stop.reason == 0
    assert request_to_stop.reason == signal.SIGTERM
    assert all(f"Signals.{number.name}" in child.stdout for number in STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


@pytest.mark.parametrize(
    ("limit_minutes", "slurm", "expected"),
    [
        (0, {}, None),
        (10, {}, 1600.0),
        (0, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "8200"}, 7900.0),
        (0, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"}, 1540.0),  # 10% of the job
        (10, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "8200"}, 1600.0),
        (0, {"SLURM_JOB_END_TIME": "8200"}, None),
    ],
)
def test_the_deadline_is_the_sooner_of_limit_and_slurm_job(limit_minutes, slurm, expected):
    assert find_deadline(limit_minutes, 5, slurm, began=1000.0) == expected


@pytest.mark.parametrize("name", ["SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"])
@pytest.mark.parametrize("value", ["Unknown", "", "-5", "1e9"])
def test_a_time_of_slurm_that_is_no_number_is_named(name: str, value: str) -> None:
    slurm = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600", name: value}
    with pytest.raises(ValueError, match=f"{name} = '{value}' in the environment: .*unset"):
        find_deadline(0, 5, slurm, began=1000.0)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_each_signal_asks_for_a_stop_unless_it_was_ignored_at_the_start(request_to_stop, number):
    """nohup and a shell's background jobs ignore some."""
    signal.signal(number, signal.SIG_IGN)
    request_to_stop.listen()
    signal.raise_signal(number)
    assert request_to_stop.reason == 0
    signal.signal(number, signal.SIG_DFL)
    request_to_stop.listen()
    signal.raise_signal(number)
    assert request_to_stop.reason == number


# --- when all ranks stop ---------------------------------------------------------------------------------------


@pytest.fixture
def vote(request_to_stop: StopRequest) -> Iterator[tuple[StopRequest, StopVote]]:
    single_rank()
    vote = StopVote(request_to_stop, timedelta(minutes=1))
    yield request_to_stop, vote
    vote.close()


def test_a_stop_is_seen_before_the_first_step(vote: tuple[StopRequest, StopVote]) -> None:
    vote[0].deadline = 0.0
    assert vote[1].ask() == TIME_LIMIT


def test_between_fast_steps_it_is_seen_one_step_later_and_stays(vote: tuple[StopRequest, StopVote]) -> None:
    assert [vote[1].ask(), vote[1].ask()] == [0, 0]
    signal.raise_signal(signal.SIGUSR1)
    assert [vote[1].ask(), vote[1].ask(), vote[1].ask()] == [0, signal.SIGUSR1, signal.SIGUSR1]


def test_after_a_slow_step_it_is_seen_at_once(vote, monkeypatch):
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr("gsa_train.reliability.stop_vote.time.monotonic", lambda: float(next(clock)))
    assert [vote[1].ask(), vote[1].ask()] == [0, 0]
    signal.raise_signal(signal.SIGUSR1)
    assert vote[1].ask() == signal.SIGUSR1


# --- that nothing is lost ----------------------------------------------------------------------------------------


def train_phase(
    folder: Path, ask: Callable[[], int], resume_from: Path | None = None, **monitor: Any
) -> tuple[list[dict[str, Any]], BaseException | None]:
    """Return the records of a run of four steps, and what ended it."""
    evaluate = {"every_steps": 2, "max_blocks": 3, "split_by_source": True}
    config = text_config([PHASE], evaluate=evaluate, checkpoint={"every_steps": 1000}, monitor=monitor)
    records, _, ended_by = train_on_text(config, folder, resume_from, stop_vote=Mock(ask=ask))
    return records, ended_by


def stop_at(question: int) -> Callable[[], int]:
    answers = iter([0] * question)
    return lambda: next(answers, int(signal.SIGTERM))


# Each step asks once before it; the validation after step 2 asks before each of its sets and sources.
@pytest.mark.parametrize(("question", "step", "in_validation"), [(1, 1, False), (2, 2, True), (3, 2, True)])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, question, step, in_validation):
    undisturbed, _ = train_phase(tmp_path / "undisturbed", lambda: 0)
    before, stop = train_phase(tmp_path / "stopped", stop_at(question))
    assert isinstance(stop, Stopped)
    assert (stop.reason, stop.step) == (signal.SIGTERM, step)
    saved = tmp_path / "stopped" / f"step_{step:08d}"
    assert read_run_state(saved).validation_due == in_validation
    after, ended_by = train_phase(tmp_path / "stopped", lambda: 0, resume_from=saved)
    assert ended_by is None
    assert sum("event" in record for record in undisturbed) == 2
    assert numbers_of(before + after) == numbers_of(undisturbed)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [(lambda: 0, [(1, False), (2, False), (3, False), (4, True)]), (stop_at(1), [(1, False), (1, True)])],
    ids=["end", "stop"],
)
def test_replicas_are_compared_before_the_last_save_too(tmp_path, monkeypatch, ask, expected):
    compared: list[tuple[int, bool]] = []
    check = Mock(
        compute=lambda step, compute: compute(),
        suspects=lambda verdict: False,
        compare_replicas=lambda step, saves: compared.append((step, saves)),
    )
    monkeypatch.setattr(trainer, "needs_check", lambda config: True)
    monkeypatch.setattr(trainer, "CorruptionCheck", lambda *_: check)
    train_phase(tmp_path, ask)
    assert compared == expected


def test_a_validation_that_a_start_makes_up_for_takes_no_time_of_a_step(tmp_path, monkeypatch):
    train_phase(tmp_path, stop_at(2))
    seconds = itertools.count(0.0, 1e-3)
    evaluate = validate.evaluate

    def slow(*arguments: Any) -> dict[str, Any]:
        nonlocal seconds
        seconds = itertools.count(next(seconds) + 1000.0, 1e-3)
        return evaluate(*arguments)

    monkeypatch.setattr(validate, "evaluate", slow)
    monkeypatch.setattr(record, "time", Mock(perf_counter=lambda: next(seconds)))
    after, _ = train_phase(tmp_path, lambda: 0, resume_from=tmp_path / "step_00000002")
    assert [each["step"] for each in after if each.get("event") == "validation"] == [2, 4]
    assert max(each["step_seconds"] for each in after if "event" not in each) < 1.0


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    records, stop = train_phase(tmp_path / "stopped", stop_at(0))
    assert isinstance(stop, Stopped)
    assert records == []
    assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(("loss", "action"), [(math.nan, "log"), (9.0, "stop")])
def test_a_stop_saves_nothing_after_a_step_that_is_not_healthy(tmp_path, monkeypatch, loss, action):
    """Step 1's loss is NaN or a spike. The step is not logged, so the monitor reads this loss only before the stop."""
    spikes = finite = math.isfinite(loss)
    row = torch.tensor([loss, 0.5, 5.0, 2.0, spikes, False, finite, False])
    train_step, plan_step = trainer.train_step, trainer.plan_step

    def step(*args: Any, **options: Any) -> StepResult:
        return dataclasses.replace(train_step(*args, **options), verdict=Verdict(torch.tensor(False), row))

    def unlogged(*args: Any, **options: Any) -> StepPlan:
        return dataclasses.replace(plan_step(*args, **options), logs=False)

    monkeypatch.setattr(trainer, "train_step", step)
    monkeypatch.setattr(trainer, "plan_step", unlogged)
    folder = tmp_path / "stopped"
    records, found = train_phase(folder, stop_at(1), action=action, patience_steps=1)
    assert isinstance(found, MonitorStop)
    assert [record["event"] for record in records] == ["spike"]
    assert not folder.exists()
