"""Runs benches of whole runs on CPU ranks."""

import json
from pathlib import Path

import pytest

from helpers.runs import run_script

SHORT = ("--seq-len", "32", "--sequences-per-device", "1", "--steps", "2", "--warmup-steps", "0")


@pytest.mark.nightly
def test_models_and_layouts_one_after_the_other(tmp_path: Path) -> None:
    """The models are ours and megatron-core's. Configs that megatron-core cannot run are reported."""
    report = tmp_path / "bench.json"
    demo = "configs/demo.yaml"
    command = ["benchmarks/bench_training.py", "--config", demo, "--megatron", demo]
    command += ["--layouts", "tp=2,sp;pp=2", "--layers", "2", *SHORT, "--json", str(report)]
    run_script(command, tmp_path / "log", ranks=2)
    rows = json.loads(report.read_text())["rows"]
    models = ["demo", "megatron"]
    assert [(row["model"], row["layout"]) for row in rows] == [
        (model, layout) for layout in ("tp=2,sp", "pp=2") for model in models
    ]
    assert [bool(row["failed"]) for row in rows] == [False, True, False, False]
    assert "sequence parallelism" in rows[1]["failed"]
    for found in (row for row in rows if not row["failed"]):
        assert found["tokens_per_second_per_device"] > 0
        assert found["step_ms_low"] <= found["step_ms"] <= found["step_ms_high"]
    # Weights and tokens are the same in all layouts.
    assert rows[0]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-4)
    assert len(rows[0]["predicted_gib"]) == 2
    assert "commit" in json.loads(report.read_text())["environment"]
