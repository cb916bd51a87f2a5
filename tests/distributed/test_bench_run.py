"""Runs the bench of whole models on two CPU ranks."""

import json
from pathlib import Path

import pytest

from helpers.runs import run_script

pytestmark = pytest.mark.nightly

SHORT = ("--seq-len", "32", "--sequences-per-device", "1", "--steps", "2", "--warmup-steps", "0")


def test_models_and_layouts_one_after_the_other(tmp_path: Path) -> None:
    """The models are ours and megatron-core's. Configs that megatron-core cannot run are reported, not fatal."""
    report = tmp_path / "bench.json"
    command = [
        "benchmarks/bench_training.py",
        "--config",
        "configs/demo.yaml",
        "--megatron",
        "configs/demo.yaml",
    ]
    command += ["--layouts", "tp=2,sp;pp=2", "--layers", "2", *SHORT, "--json", str(report)]
    run_script(command, tmp_path / "log", ranks=2)
    rows = json.loads(report.read_text())["rows"]
    models = ["demo", "megatron (local)", "megatron (sdpa)"]
    assert [(row["model"], row["layout"]) for row in rows] == [
        (model, layout) for layout in ("tp=2,sp", "pp=2") for model in models
    ]
    assert [bool(row["failed"]) for row in rows] == [False, True, True, False, False, False]
    assert "sequence parallelism" in rows[1]["failed"]
    for found in (row for row in rows if not row["failed"]):
        assert found["tokens_per_second_per_device"] > 0
        assert (found["causal_keys"], found["attended_keys"]) == (33 / 2, 33 / 2)  # the budget is larger
        assert found["step_ms_low"] <= found["step_ms"] <= found["step_ms_high"]
    # Weights and text are the same in all layouts. The peers differ only in the rounding of attention.
    assert rows[0]["loss"] == pytest.approx(rows[3]["loss"], rel=1e-4)
    assert rows[4]["loss"] == pytest.approx(rows[5]["loss"], rel=1e-4)
    assert len(rows[0]["predicted_gib"]) == 2
    assert "commit" in json.loads(report.read_text())["environment"]


def test_ranks_that_run_out_of_memory(tmp_path: Path) -> None:
    """If all ranks run out of memory, the next variant follows. If one does, the run ends and reports why."""
    report = tmp_path / "bench.json"
    command = ["tests/helpers/failing_bench.py", "--config", "configs/demo.yaml", "--json", str(report)]
    command += ["--layouts", "tp=1;tp=2;tp=1,opt=off;tp=2,sp", "--layers", "1", *SHORT]
    failures = [[0, 0, 1], [0, 1, 1], [2, 1, 1]]
    environment = {"FAILURES": json.dumps(failures)}
    output = run_script(command, tmp_path / "log", ranks=2, expected=1, environment=environment)
    rows = json.loads(report.read_text())["rows"]
    assert [row["layout"] for row in rows] == ["tp=1", "tp=2", "tp=1,opt=off"]
    reason = "out of memory: CUDA out of memory. Tried to allocate 3.00 GiB."
    assert rows[0]["failed"] == f"on all ranks: {reason}"
    assert (rows[1]["failed"], rows[1]["tokens_per_second_per_device"] > 0) == ("", True)
    alone = f"1 of 2 ranks failed, and the others wait for them. rank 1: {reason}"
    assert rows[2]["failed"] == alone
    assert f"demo, tp=1,opt=off: {alone}\nresults so far: {report}" in output
    assert "Traceback" not in output


def test_a_breakdown_needs_a_gpu(tmp_path: Path) -> None:
    command = ["benchmarks/bench_training.py", "--config", "configs/demo.yaml", "--breakdown"]
    output = run_script(command, tmp_path / "log", ranks=1, expected=2, launcher="python")
    assert "--breakdown needs CUDA devices" in output
