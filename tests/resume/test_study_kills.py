"""Tests that a study which is killed at random moments reports the same as an undisturbed one."""

import csv
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from gsa_train.config import config_to_yaml, load_config
from gsa_train.metrics.record_format import read_records
from helpers.runs import CONFIG, ENVIRONMENT, LONGEST_WAIT_SECONDS, REPOSITORY, inherited

# These are real studies. test_study_runner.py and test_study_weights.py test the rules.
pytestmark = pytest.mark.nightly

STEPS = 10
PHASE = {"name": "only", "steps": STEPS, "train": "all", "lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 2}
ARMS = {
    "gated": {"gsa.attention": "dense"},
    "gsa": {"gsa.attention": "sparse", "phases": [{**PHASE, "attention": "sparse"}]},
}
STARTED = "jobs are finished, "
"""Part of the first line that each start prints."""
SEED = 28
"""Seed of the moments; the test waits for their steps, so that they are moments of real runs."""


def write_study(folder: Path) -> Path:
    phases = json.dumps([{**PHASE, "attention": "dense"}])
    own = (f"phases={phases}", "checkpoint.every_steps=2", "evaluate.every_steps=5", "evaluate.max_blocks=4")
    config = load_config(REPOSITORY / CONFIG, [*own, "train.micro_batch_size=4", "model.hidden_size=32"])
    folder.mkdir()
    (folder / "base.yaml").write_text(config_to_yaml(config))
    study = {
        "name": "two",
        "dir": str(folder),
        "config": str(folder / "base.yaml"),
        "seeds": [1],
        "arms": [{"name": name, "set": fields} for name, fields in ARMS.items()],
        "metrics": [
            {"key": "loss", "at_tokens": [1000, 2000]},
            {"key": "validation_loss"},
            {"key": "val_perplexity", "source": "summary"},
            {"key": "grad_norm", "statistic": "max"},
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


class Start:
    """A start of `launch/study.py`, whose output is appended to the study's log."""

    def __init__(self, study: Path) -> None:
        self.log = study.with_name("study.log")
        words = ["launch/study.py", "--study", str(study), "--gpus", "none"]
        environment = {**inherited(), **ENVIRONMENT}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def finish(self) -> int:
        return self.process.wait(LONGEST_WAIT_SECONDS)


def rows_of(study: Path, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    with (study.parent / "two" / "report" / name).open() as file:
        return [{column: row[column] for column in columns} for row in csv.DictReader(file)]


def tables(study: Path) -> list[list[dict[str, str]]]:
    return [
        rows_of(study, "arms.csv", ("arm", "metric", "at", "n", "mean", "deviation", "not_finite")),
        rows_of(study, "values.csv", ("arm", "seed", "metric", "at", "value")),
    ]


def steps_logged(study: Path, arm: str) -> int:
    path = study.parent / "two" / f"{arm}-seed1" / "metrics.jsonl"
    return max((record["step"] for record in read_records(path)), default=0) if path.exists() else 0


def wait_until(condition: Callable[[], object], running: Start, may_end: bool = False) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if may_end and running.process.poll() == 0:
            return
        assert running.process.poll() is None, running.output
        assert time.monotonic() < deadline, running.output
        time.sleep(0.005)


def arm_under_way(running: Start) -> psutil.Process:
    (arm,) = psutil.Process(running.process.pid).children()
    return arm


def test_a_study_killed_at_random_reports_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    undisturbed = write_study(tmp_path / "undisturbed")
    assert Start(undisturbed).finish() == 0
    study, moments = write_study(tmp_path / "killed"), random.Random(SEED)

    running = Start(study)  # an arm dies: it resumes by itself after a checkpoint, or by the next start
    at = moments.randint(1, STEPS - 4)
    wait_until(lambda: steps_logged(study, "gated") >= at, running)
    arm_under_way(running).kill()
    if moments.random() < 0.5:
        wait_until(lambda: "killed by SIGKILL" in running.output, running)
    running.process.send_signal(signal.SIGKILL)  # and then the runner
    assert running.finish() == -signal.SIGKILL
    assert not (study.parent / "two" / "report").exists()

    running = Start(study)
    at = moments.randint(1, STEPS - 4)
    wait_until(lambda: steps_logged(study, "gsa") >= at, running)
    arm = arm_under_way(running)
    running.process.send_signal(signal.SIGKILL)  # only the runner: its arm saves and ends
    assert running.finish() == -signal.SIGKILL

    starts = running.output.count(STARTED)
    running = Start(study)  # at once, while the arm may still run
    at = min(STEPS - 1, steps_logged(study, "gsa") + 1)
    wait_until(
        lambda: (
            running.output.count(STARTED) > starts
            and not arm.is_running()
            and steps_logged(study, "gsa") >= at
        ),
        running,
        may_end=True,  # few steps may remain, and the system may report the arm's end late
    )
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
    assert running.finish() in (0, 75)  # 0: it was about to end

    running = Start(study)
    assert running.finish() == 0, running.output
    assert tables(study) == tables(undisturbed)
    arms, values = tables(study)
    assert [row["n"] for row in arms] == ["1"] * 2 * 5
    assert len(values) == len({row["value"] for row in values}) == 2 * 5, "the arms differ"
