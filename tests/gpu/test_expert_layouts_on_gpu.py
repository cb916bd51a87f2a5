"""Tests that mixtures of experts give similar results on one rank and in every two-rank layout (NCCL, bf16). The
tolerance comes from one-rank runs that differ only in rounding (tests/helpers/layouts_on_gpu.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gsa_train.distributed.cuda_connections import VARIABLE
from helpers.layouts_on_gpu import layouts_that_fit
from helpers.runs import REPOSITORY
from helpers.tiers import needs_devices

RANKS, STEPS = 2, 3

pytestmark = needs_devices(RANKS)


def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    layouts = set(layouts_that_fit(RANKS, experts=True))
    assert len(layouts) == 10, "the others need four ranks: make layouts-gpu"
    report = tmp_path / "layouts.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command += ["tests/helpers/layouts_on_gpu.py", "--experts", "--steps", str(STEPS), "--json", str(report)]
    environment = {
        **os.environ,
        VARIABLE: "1",  # as training with tensor parallelism sets it
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout[-8000:])
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    rows = json.loads(report.read_text())["layouts"]
    assert set(rows) == layouts
    assert all(row["passed"] and len(row["series"]) == 2 * STEPS for row in rows.values())
