"""Start, watch and kill real training runs: torchrun launch/pretrain.py on the bundled text."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from gsa_train.sinks import read_records

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = "configs/demo.yaml"
MARK = "GSA_TEST_RUN"
"""Environment variable that all processes of one run inherit, workers in sessions of their own included."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled at run time, and the import is a second faster
}

SMALL = (
    "train.seq_len_tokens=128",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "phases.0.steps=10",
    "phases.0.warmup_steps=9",
    "phases.0.lr=0.9e-3",
    "phases.0.min_lr=0.9e-3",
    "phases.1.steps=10",
    "phases.1.warmup_steps=9",
    "phases.1.lr=1.35e-3",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=10",
    "evaluate.every_steps=0",
    "evaluate.max_blocks=7",
    "evaluate.split_by_source=true",
    "evaluate.ngram_baselines=false",
    "logging.every_steps=1",
    "logging.wandb=disabled",
    "logging.tensorboard=false",
    "logging.plots=false",
)
"""The demo's model on short sequences: 10 steps of each phase, every one logged, every fifth saved. The learning
rates rise as at the demo's beginning, but more gently: every step multiplies what one rounded bit has changed."""

STEPS = 20

QUICK = ("train.global_batch_size=4", "checkpoint.every_steps=1000")
"""Half the sequences, and one checkpoint at the end."""

ALL_KEYS = (*QUICK, "gsa.k_min=128", "gsa.k_base=128")
"""Every query selects all that it sees, so no rounding can change a selection."""


@dataclass
class Run:
    """A run under way or over."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    """What this start printed."""
    mark: str

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def latest(self) -> str:
        """Name of the checkpoint that a resume would load; empty when there is none."""
        pointer = self.checkpoints / "latest"
        return pointer.read_text() if pointer.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        """Every record logged so far."""
        path = self.folder / "metrics.jsonl"
        return read_records(path) if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        """The records of training steps, without validations."""
        return [record for record in self.records() if "event" not in record]

    def series(self, key: str) -> list[Any]:
        return [record[key] for record in self.steps()]

    def wait(self, expected: int = 0, seconds: float = 300) -> Run:
        """Wait for the end and check the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill(self)
            raise AssertionError(f"not over after {seconds} s:\n{self.output[-3000:]}") from None
        assert code == expected, f"exit code {code}, expected {expected}:\n{self.output[-5000:]}"
        return self

    def wait_until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Poll closely until the condition holds; fail if the run ends or the time runs out before."""
        deadline = time.monotonic() + seconds
        while not condition():
            over = self.process.poll() is not None or time.monotonic() > deadline
            if over and not condition():
                kill(self)
                raise AssertionError(f"the run did not get there:\n{self.output[-5000:]}")
            time.sleep(0.002)


def start(
    run_dir: Path,
    *overrides: str,
    ranks: int = 1,
    config: str = CONFIG,
    name: str = "run",
    torchrun: bool = True,
) -> Run:
    """Start a run in `run_dir/name`; options such as --no-resume may stand among the overrides."""
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    log = run_dir / f"{name}-{mark[:8]}.log"
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if torchrun else []
    )
    command = [sys.executable, *launcher, "launch/pretrain.py", "--config", config]
    command += [f"run.dir={run_dir}", f"run.name={name}", *overrides]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Run(run_dir / name, process, log, mark)


def train(run_dir: Path, *overrides: str, ranks: int = 1, **options: Any) -> Run:
    """A whole run, from start to its successful end."""
    return start(run_dir, *overrides, ranks=ranks, **options).wait()


@cache
def finished(*overrides: str, ranks: int = 1) -> Run:
    """A whole `SMALL` run, made once per test session and shared: leave its folder as it is."""
    folder = Path(tempfile.mkdtemp(prefix="gsa_test_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train(folder, *SMALL, *overrides, ranks=ranks)


def processes_of(run: Run) -> list[psutil.Process]:
    """Every living process of a run: launcher, ranks, readers, checkpoint writers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == run.mark:
                found.append(process)
    return found


def kill(run: Run, at_once: Sequence[psutil.Process] = ()) -> list[int]:
    """SIGKILL to every process of a run, first to those named; returns their ids, all of them dead."""
    killed: list[int] = []
    deadline = time.monotonic() + 20
    alive = list(at_once) or processes_of(run)
    while alive:
        assert time.monotonic() < deadline, f"survived SIGKILL: {alive}"
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)
        run.process.wait(20)
        alive = processes_of(run)
    return sorted(set(killed))
