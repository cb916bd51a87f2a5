"""Tests the measurement of data wait on a run of one CPU rank with a reader."""

import os
import re
import subprocess
import sys

from helpers.runs import CONFIG, ENVIRONMENT, REPOSITORY


def measure(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/data_wait.py", "--config", CONFIG, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_short_run_says_what_it_waited_and_what_its_reader_took() -> None:
    sizes = (
        "train.seq_len_tokens=64",
        "train.global_batch_size=4",
        "model.num_layers=2",
        "data.num_workers=1",
    )
    done = measure("--sample", "--steps", "8", *sizes)
    assert done.returncode == 0, done.stderr[-3000:]
    steps, waits, cores = done.stdout.splitlines()
    first, last = map(int, re.match(r"steps (\d+)-(\d+): ", steps).groups())
    assert last - first >= 4
    share = float(re.match(r"waiting for text: ([\d.]+)% of the time", waits)[1])
    assert 0 <= share < 100
    assert re.match(r"readers \(1 per data-parallel rank\) kept \d\.\d\d CPU cores busy; the ranks", cores)


def test_a_run_that_fails_is_reported() -> None:
    """The run fails at once, because it believes to be one of two ranks, and one sequence does not suffice."""
    batch = ("train.global_batch_size=1", "train.micro_batch_size=1")
    done = measure(*batch, WORLD_SIZE="2", RANK="0")
    assert done.returncode == 1
    assert "the run ended with exit code 2" in done.stderr
