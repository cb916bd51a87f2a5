"""The fused kernels over two tensor-parallel ranks, which share out the rows of the indexer's loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import ENVIRONMENT, REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("fused_ranks") / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(REPOSITORY / "tests" / "helpers" / "fused_ranks.py"), str(out)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(Path(out).read_text())


@pytest.mark.parametrize("name", ["bits", "lists", "blocks"])
def test_tensor_parallel_ranks_train_what_ranks_with_all_heads_train(found: Any, name: str) -> None:
    """In the warm-up the gradient norm is the indexer's alone."""
    tensor, data = found[name]["tensor"], found[name]["data"]
    assert len(tensor) == len(data) == 3  # a step of each phase, and a validation
    for record, other in zip(tensor, data, strict=True):
        assert record.keys() == other.keys()
        for key in record:
            assert record[key] == pytest.approx(other[key], rel=2e-4, abs=1e-7, nan_ok=True), key
