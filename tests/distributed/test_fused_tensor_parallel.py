"""Tests the fused kernels over two tensor-parallel ranks, which divide the rows of the indexer loss."""

import json
from typing import Any

import pytest

from helpers.runs import run_script

STEPS = {"bits": 3, "lists": 2}
"""Steps of each case: one per phase, and a validation."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fused_ranks")
    run_script(["tests/helpers/fused_ranks.py", str(folder / "results.json")], folder / "log", ranks=2)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", STEPS)
def test_tensor_parallel_ranks_train_what_ranks_with_all_heads_train(found: Any, name: str) -> None:
    """In the warm-up only the indexer contributes to the gradient norm."""
    tensor, data = found[name]["tensor"], found[name]["data"]
    assert len(tensor) == len(data) == STEPS[name]
    for record, other in zip(tensor, data, strict=True):
        assert record.keys() == other.keys()
        for key in record:
            assert record[key] == pytest.approx(other[key], rel=2e-4, abs=1e-7, nan_ok=True), key
