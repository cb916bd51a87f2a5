"""Tests runs that are asked to stop. Such a run saves at the current step, and a resume gives the results of an
undisturbed run."""

import contextlib
import json
import signal
from pathlib import Path

import psutil
import pytest

from helpers.launchers import launch, ranks_of
from helpers.runs import STEPS, Run, finished, left_of, numbers_of, processes_of
from helpers.runs import start as start_forked

RANKS = 2
COMMAND = ("checkpoint.every_steps=1000", "data.num_workers=1", "logging.wandb=offline")

pytestmark = pytest.mark.slow


def start(run_dir: Path, *overrides: str, **faults: object) -> Run:
    torchrun = ("--standalone", f"--nproc_per_node={RANKS}")
    return launch(run_dir, *COMMAND, *overrides, torchrun=torchrun, faults=faults)


def stopped(run: Run) -> dict[str, object]:
    return json.loads((run.folder / "stopped.json").read_text())


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Stop one run three times. Only stops and the end write checkpoints. Rank 1 waits for its signals."""
    run_dir = tmp_path_factory.mktemp("stopped")

    # SIGTERM goes to torchrun, which forwards it to each rank with its readers and W&B's service.
    by_torchrun = start(run_dir, waits_for=[4, 1, signal.SIGTERM])
    by_torchrun.wait_until(lambda: len(by_torchrun.steps()) >= 3)
    by_torchrun.process.send_signal(signal.SIGTERM)
    by_torchrun.wait(expected=1)  # torchrun's own exit code
    saved = int(stopped(by_torchrun)["step"])
    assert stopped(by_torchrun)["reason"] == "SIGTERM"
    assert by_torchrun.latest == f"step_{saved:08d}"
    assert 3 <= saved <= len(by_torchrun.steps()) == saved

    # The time ends before the first step.
    by_clock = start_forked(run_dir, *COMMAND, "run.time_limit_minutes=0.001", ranks=RANKS).wait(expected=75)
    assert (stopped(by_clock)["step"], stopped(by_clock)["reason"]) == (saved, "the time limit")

    # SIGUSR1 goes to one rank. While both write, SIGTERM goes to every process except torchrun, as Slurm may send it.
    waits_for, write_waits_for = [saved + 4, 1, signal.SIGUSR1], [1, signal.SIGTERM]
    twice = start(run_dir, waits_for=waits_for, write_waits_for=write_waits_for)
    twice.wait_until(lambda: len(twice.steps()) >= saved + 3)
    launcher = twice.process.pid
    ranks_of(twice)[1].send_signal(signal.SIGUSR1)
    twice.wait_until(lambda: [*twice.checkpoints.glob(".tmp_step_*")])
    for process in processes_of(twice):
        if process.pid != launcher:
            with contextlib.suppress(psutil.NoSuchProcess):  # ranks start some processes that end at once
                process.send_signal(signal.SIGTERM)
    twice.wait(expected=1)
    assert "exitcode  : 75" in twice.output
    assert stopped(twice)["reason"] == "SIGUSR1"

    return [by_torchrun, by_clock, twice, start_forked(run_dir, *COMMAND, ranks=RANKS).wait()]


def test_every_stop_saved_the_step_where_it_was(stops: list[Run]) -> None:
    names = sorted(path.name for path in stops[0].checkpoints.glob("step_*"))
    assert len(names) == 3
    assert names[-1] == "step_00000020"
    assert not [*stops[0].checkpoints.glob(".*")]
    assert "Traceback" not in stops[2].output.split("W&B gets no more records")[0]


def test_no_process_of_a_stopped_run_is_left(stops: list[Run]) -> None:
    assert [left_of(run) for run in stops] == [[]] * len(stops)


def test_the_numbers_match_a_run_that_was_not_stopped(stops: list[Run]) -> None:
    assert not (stops[-1].folder / "stopped.json").exists()
    assert stops[-1].series("step") == list(range(1, STEPS + 1))
    assert numbers_of(stops[-1].records()) == numbers_of(finished(ranks=RANKS).records())
