"""The bench of what watching costs, on a tiny model on the CPU: its three kinds of steps run and are told apart."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels" / "bench"))

import bench_monitor

from helpers.single_rank import single_rank, tiny_config


def test_steps_of_each_kind_are_timed() -> None:
    seconds = bench_monitor.time_watching(tiny_config(), single_rank(), rounds=2)
    assert {name: len(times) for name, times in seconds.items()} == {
        "unwatched": 2,
        "watched": 2,
        "logged": 2,
        "verdict alone": 50,
    }
    assert min(seconds["watched"]) > min(seconds["verdict alone"]) > 0
