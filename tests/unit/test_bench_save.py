"""The bench of saves takes steps and saves of a tiny model, as before and as now."""

from __future__ import annotations

from pathlib import Path

import bench_save
import pytest

from helpers.single_rank import SPARSE, single_rank, tiny_config
from whole_steps.step_bench import OurTrainee

pytestmark = pytest.mark.nightly


def test_each_way_has_a_first_a_later_and_a_last_save(tmp_path: Path) -> None:
    config = tiny_config([SPARSE])
    trainee = OurTrainee(config, SPARSE, single_rank())
    for way in bench_save.WAYS:
        rows = list(bench_save.measure(way, trainee, config, tmp_path / way, steps=1, saves=2))
        assert rows.pop()["read_s"] > 0
        assert [(row["way"], row["save"]) for row in rows] == [
            (way, each) for each in ("first", "later", "last")
        ]
        for row in rows:
            assert row["plan_s"] > 0 < row["host_s"]
            assert row["durable_s"] > 0 < row["step_s"]
            assert row["gb"] > 1e-5
        assert rows[-1]["stall_s"] >= rows[-1]["durable_s"]
        assert len(list((tmp_path / way).glob("step_*"))) == 1
    trainee.close()
