"""Tests the measurement of data wait on a run of one CPU rank with a reader."""

import os
import re
import subprocess
import sys

from helpers.runs import CONFIG, ENVIRONMENT, REPOSITORY


def test_a_short_run_says_what_it_waited_and_what_its_reader_took() -> None:
    command = [sys.executable, "benchmarks/data_wait.py", "--config", CONFIG, "--sample", "--steps", "8"]
    command += ["train.seq_len_tokens=64", "train.global_batch_size=4", "model.num_layers=2"]
    command += ["data.num_workers=1"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps, waits, cores = done.stdout.splitlines()
    first, last = map(int, re.match(r"steps (\d+)-(\d+): ", steps).groups())
    assert last - first >= 4
    share = float(re.match(r"waiting for text: ([\d.]+)% of the time", waits)[1])
    assert 0 <= share < 100
    assert re.match(r"readers \(1 per data-parallel rank\) kept \d\.\d\d CPU cores busy; the ranks", cores)
