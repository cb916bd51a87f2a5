"""Runs bench_step.py on a CPU: whole models in turns, and over lengths."""

import json
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import torch

from helpers.bench_without_cuda import stand_in_for_cuda

pytestmark = pytest.mark.nightly


def test_bench_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests which models take turns, and which ratios the report lists as bars."""
    import bench_step

    from gsa_train.config import load_config
    from helpers.single_rank import single_rank

    def load(name: str, sequences: int, overrides: list[str]) -> Any:
        size = [f"train.global_batch_size={sequences}", "train.micro_batch_size=1", "model.num_layers=1"]
        own = [*size, "train.seq_len_tokens=64", "data.num_workers=0", *overrides, *name.split(",")[1:]]
        return load_config(harness.ROOT / "configs" / "demo.yaml", own, world_size=1, need_data=False)

    turns: list[str] = []
    stand_in_for_cuda(monkeypatch)

    class Subject(bench_step.Subject):
        def step_seconds(self) -> float:
            super().step_seconds()
            turns.append(self.name)
            return {"standard_x": 2.0, "gsa_x": 3.0}.get(self.name, 5.0)

    names = ["standard_x", "gsa_x", "gsa_x,gsa.indexer_loss_row_fraction=0.25", "baseline_x"]
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    monkeypatch.setattr(bench_step, "init_parallel", lambda *_, **__: single_rank())
    monkeypatch.setattr(bench_step, "shutdown_parallel", lambda: None)  # it serves other tests, too
    monkeypatch.setattr(bench_step, "load", load)
    monkeypatch.setattr(bench_step, "Subject", Subject)
    options = ["--micro-batch=1", "--sequences=1", "--turns=2", "--warm-up-seconds=0", "--no-profile"]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--out", str(tmp_path), *options, "--configs", *names])
    assert bench_step.main() == 0
    standard, *others = names
    assert turns == [standard] * 3 + [name for each in others for name in ([standard, each] * 2 + [each])]
    report = json.loads((tmp_path / "bench_step.json").read_text())
    rows = [row for row in report["rows"] if "ratio" in row]
    assert [row["ratio"] for row in rows] == [1.0, 1.5, 2.5, 2.5]
    assert not any(row["ratio_error"] for row in rows)
    assert [bar["value"] for bar in report["bars"]][1:] == [1.5, 2.5, 2.5]
