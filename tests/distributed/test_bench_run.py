"""A run of the bench of whole models, on two CPU ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from helpers.forked import ForkedRanks
from helpers.runs import ENVIRONMENT, REPOSITORY


def test_models_and_layouts_one_after_the_other(tmp_path: Path) -> None:
    """Ours and megatron-core's on two ranks; what megatron-core cannot run is said, and the rest goes on."""
    report, log = tmp_path / "bench.json", tmp_path / "log"
    command = ["launch/bench_training.py", "--config", "configs/demo.yaml", "--megatron", "configs/demo.yaml"]
    command += [
        "--layouts",
        "tp=2,sp;pp=2",
        "--layers",
        "2",
        "--seq-len",
        "32",
        "--sequences-per-device",
        "1",
    ]
    command += ["--steps", "2", "--warmup-steps", "0", "--json", str(report)]
    ranks = ForkedRanks(command, REPOSITORY, {**os.environ, **ENVIRONMENT}, {}, log, ranks=2, rendezvous=True)
    assert ranks.wait(300) == 0, log.read_text()[-4000:]
    rows = json.loads(report.read_text())["rows"]
    models = ["demo", "megatron (local)", "megatron (sdpa)"]
    assert [(row["model"], row["layout"]) for row in rows] == [
        (model, layout) for layout in ("tp=2,sp", "pp=2") for model in models
    ]
    assert [bool(row["failed"]) for row in rows] == [False, True, True, False, False, False]
    assert "sequence parallelism" in rows[1]["failed"]
    for found in (row for row in rows if not row["failed"]):
        assert found["tokens_per_second_per_device"] > 0
        assert found["step_ms_low"] <= found["step_ms"] <= found["step_ms_high"]
    # The same weights and text, whatever the layout; and the peers differ in the attention's rounding only.
    assert rows[0]["loss"] == pytest.approx(rows[3]["loss"], rel=1e-4)
    assert rows[4]["loss"] == pytest.approx(rows[5]["loss"], rel=1e-4)
    assert len(rows[0]["predicted_gib"]) == 2
    assert "commit" in json.loads(report.read_text())["environment"]
