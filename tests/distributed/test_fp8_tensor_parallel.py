"""Tests FP8 linear layers over two tensor-parallel ranks (helpers/fp8_ranks.py)."""

import json
from pathlib import Path

from helpers.runs import run_script


def test_two_ranks_compute_what_one_rank_computes(tmp_path: Path) -> None:
    """Each rank rounds its shard with the scale of the whole matrix. With the shard's own scale, results would differ
    by 0.01 or more."""
    run_script(["tests/helpers/fp8_ranks.py", str(tmp_path / "results.json")], tmp_path / "log", ranks=2)
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found) == 2 * 2 * 3
    for name, difference in found.items():
        assert difference < 2e-6, name
