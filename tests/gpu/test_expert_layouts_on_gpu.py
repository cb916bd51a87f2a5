"""Tests that mixtures of experts over NCCL in bf16 equal one rank in every layout of two ranks. The tolerance is the
spread of one rank's results if only rounding changes (tests/helpers/layouts_on_gpu.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gsa_train.distributed.cuda_connections import VARIABLE
from helpers.layouts_on_gpu import EXPERT_LAYOUTS, Subject, layouts_that_fit
from helpers.runs import REPOSITORY

RANKS, STEPS = 2, 3
LIMIT_SECONDS = 600
OF_TWO_RANKS = {
    "dp",
    "ep 2",
    "ep 2, overlapped",
    "ep 2, replicated optimizer",
    "ep 2, recompute full",
    "tp 2, sp, whole experts",
    "tp 2, sp, ep 2",
    "tp 2, sp, etp 2",
    "cp 2, ep 2",
    "pp 2",
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices"),
]


def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    assert set(layouts_that_fit(RANKS, Subject(False, "bf16", experts=True))) == OF_TWO_RANKS
    assert set(EXPERT_LAYOUTS) > OF_TWO_RANKS, "pipeline x expert needs four ranks: make layouts-gpu"
    report = tmp_path / "layouts.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command += ["tests/helpers/layouts_on_gpu.py", "--experts", "--steps", str(STEPS), "--json", str(report)]
    paths = [str(REPOSITORY / folder) for folder in (".", "kernels", "data", "tests", "benchmarks")]
    environment = {
        **os.environ,
        VARIABLE: "1",  # as training with tensor parallelism sets it
        "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    print(done.stdout[-8000:])
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    rows = json.loads(report.read_text())["layouts"]
    assert set(rows) == OF_TWO_RANKS
    assert all(row["passed"] for row in rows.values())
    assert all(len(row["series"]) == 2 * STEPS for row in rows.values())
