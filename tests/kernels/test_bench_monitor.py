"""The bench of what watching costs, on a tiny model on the CPU: its three kinds of steps run and are told apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_monitor
import pytest

from gsa_train.metrics.record_format import read_records
from helpers.single_rank import single_rank, tiny_config

pytestmark = pytest.mark.nightly


def test_steps_of_each_kind_are_timed(tmp_path: Path) -> None:
    config = tiny_config(logging={"wandb": "offline", "every_steps": 10})
    seconds = bench_monitor.time_watching(config, single_rank(), rounds=2, run_dir=tmp_path)
    assert {name: len(times) for name, times in seconds.items()} == {
        "unwatched": 2,
        "watched": 2,
        "logged": 2,
        "verdict alone": 50,
    }
    assert min(seconds["watched"]) > min(seconds["verdict alone"]) > 0
    records = read_records(tmp_path / "metrics.jsonl")
    assert len(records) == 3  # one compiles
    assert all({"recall", "update_norm", "mfu", "slowest_rank"} <= record.keys() for record in records)
    assert list(tmp_path.glob("tensorboard/events*"))
    assert list(tmp_path.glob("wandb/offline-run*"))


def test_differences_within_rounds() -> None:
    """A drift that both kinds percent is no error."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    more = [each + extra for each, extra in zip(drift, (0.1, 0.2, 0.1, 0.3, 0.1), strict=True)]
    percent, error = bench_monitor.difference(more, drift, of=1000.0)
    assert math.isclose(percent, 0.01)
    assert math.isclose(error, 0.0, abs_tol=1e-9)
    percent, error = bench_monitor.difference([0.1, 0.2, 0.3], [0.0, 0.0, 0.0], of=100.0)
    assert math.isclose(percent, 0.2)
    assert math.isclose(error, 1.25 * 1.48 * 0.1 / 3**0.5)
