"""Tests Ctrl-C. At the first Ctrl-C a run saves a checkpoint and ends. A second Ctrl-C, or any Ctrl-C before
the first step, ends the run at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gsa_train.metrics.goodput.ledger import read_account
from helpers.forked import ForkedAgent
from helpers.launchers import launch
from helpers.runs import CONFIG, ENVIRONMENT, REPOSITORY, Run, left_of, train

COMMAND = ("checkpoint.every_steps=1000", "data.num_workers=1", "logging.wandb=offline")
SAYS = "interrupted: the step under way is finished and saved"

pytestmark = pytest.mark.slow


def start(run_dir: Path, **faults: object) -> Run:
    return launch(run_dir, *COMMAND, torchrun=("--standalone", "--nproc_per_node=2"), faults=faults)


def press(run: Run) -> None:
    """Send Ctrl-C to the terminal's process group: torchrun, but not its ranks."""
    assert isinstance(run.process, ForkedAgent)
    os.killpg(run.process.pid, signal.SIGINT)


def test_once_saves_and_twice_ends_at_once(tmp_path: Path) -> None:
    once = start(tmp_path, waits_for=[4, 1, signal.SIGINT])
    once.wait_until(lambda: len(once.steps()) >= 3)
    press(once)
    once.wait(expected=1)  # torchrun's own exit code
    saved = json.loads((once.folder / "stopped.json").read_text())
    assert saved["reason"] == "Ctrl-C"
    assert once.latest == f"step_{saved['step']:08d}"
    assert once.output.count(SAYS) == 1
    assert f"Ctrl-C: saving a checkpoint at step {saved['step']}" in once.output
    assert f"stopped by Ctrl-C after step {saved['step']}; exit code 75: the same command goes" in once.output
    assert "wandb sync" in once.output.split("saving a checkpoint")[1]
    assert once.output.count("Traceback") == 1  # torchrun's own traceback
    assert left_of(once) == []

    # Rank 1's save waits for a signal that does not come, so that the second Ctrl-C comes during the save.
    waits_for = [saved["step"] + 3, 1, signal.SIGINT]
    twice = start(tmp_path, waits_for=waits_for, write_waits_for=[1, signal.SIGUSR1])
    twice.wait_until(lambda: len(twice.steps()) >= saved["step"] + 2)
    press(twice)
    twice.wait_until(lambda: "Ctrl-C: saving a checkpoint" in twice.output)
    press(twice)
    twice.wait(expected=1)
    assert "ended at once; the same command goes on from the last checkpoint" in twice.output
    assert twice.latest == once.latest
    assert left_of(twice) == []

    assert f"resuming from {once.checkpoints / once.latest}" in train(tmp_path, *COMMAND, ranks=2).output

    account = read_account(once.folder)
    assert [each.ended for each in account.starts] == ["interrupted", "lost", "complete"]
    assert account.starts[1].down_seconds == 0  # the user's own time
    assert account.starts[2].down_seconds == account.lost_seconds["down"] > 0


def test_before_the_first_step(tmp_path: Path) -> None:
    command = [sys.executable, "launch/pretrain.py", "--config", CONFIG, f"run.dir={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT}, **pipes)
    said = process.stdout.readline()
    assert said.startswith(f"tiny: training by {CONFIG} on 1 rank, run folder {tmp_path}/tiny")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert error.strip() == "interrupted before the first step"
    assert not (tmp_path / "tiny").exists()
