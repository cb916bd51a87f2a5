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
    """The test checks which small models take turns and which ratios are bars. Nothing is profiled on a CPU."""
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

    names = ["standard_x", "gsa_x", "gsa_x,gsa.indexer_loss_row_fraction=0.25"]
    monkeypatch.setattr(bench_step, "init_parallel", lambda *_, **__: single_rank())
    monkeypatch.setattr(bench_step, "shutdown_parallel", lambda: None)  # it serves other tests, too
    monkeypatch.setattr(bench_step, "load", load)
    monkeypatch.setattr(bench_step, "Subject", Subject)
    options = [
        "--micro-batch",
        "1",
        "--sequences",
        "1",
        "--steps",
        "2",
        "--warm-up-seconds",
        "0",
        "--no-profile",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--out", str(tmp_path), *options, "--configs", *names])
    assert bench_step.main() == 0
    standard, gsa, fraction = names
    assert turns == [standard] * 3 + ([standard, gsa] * 2 + [gsa]) + ([standard, fraction] * 2 + [fraction])
    report = json.loads((tmp_path / "bench_step.json").read_text())
    rows = [row for row in report["rows"] if "ratio" in row]
    assert [(row["ratio"], row["ratio_error"]) for row in rows] == [(1.0, 0.0), (1.5, 0.0), (2.5, 0.0)]
    assert [bar["value"] for bar in report["bars"]][1:] == [1.5, 2.5]


def test_bench_step_over_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call measures what the earlier ones' file lacks. A case that does not fit in memory reports so, and the others
    continue. The whole model follows from two depths."""
    import bench_step

    from helpers.single_rank import single_rank
    from whole_steps import step_cases, step_sweep

    stand_in_for_cuda(monkeypatch)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_hidden_size": 32}
    fields = [f"model.{name}={size}" for name, size in sizes.items()]
    fields += ["model.vocab_size=64", "gsa.indexer_dim=16", "gsa.k_base=8", "gsa.k_min=4", "gsa.k_max=16"]
    fields += ["train.precision=fp32", "gsa.dense_attention=auto"]
    tiny = step_cases.StepShape("1.7b", layers=10, depths=(1, 2), shallow=(1,), overrides=tuple(fields))
    monkeypatch.setitem(step_cases.SHAPES, "1.7b", tiny)
    monkeypatch.setitem(step_cases.MODELS, "standard", ())
    monkeypatch.setattr(step_sweep, "init_parallel", lambda *_, **__: single_rank())
    monkeypatch.setattr(step_sweep, "shutdown_parallel", lambda: None)
    measured: list[tuple[str, int, str]] = []
    full: list[str] = []

    class Subject(step_sweep.Subject):
        def step_seconds(self) -> float:
            if self.name in full:
                raise torch.OutOfMemoryError("no room\nfor more")
            super().step_seconds()
            return (2.0 if self.name == "standard" else 1.0) + self.bench.config.model.num_layers

    def measure(subject: Any, reference: Any, *options: Any) -> Any:
        other = reference.name if reference else ""
        measured.append((subject.name, subject.bench.config.model.num_layers, other))
        return timed(subject, reference, *options)

    timed = step_sweep.measure
    monkeypatch.setattr(step_sweep, "measure", measure)
    monkeypatch.setattr(step_sweep, "Subject", Subject)

    def call(*models: str, others: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        options = [
            "--lengths",
            "128",
            "--shapes",
            "1.7b",
            "--tokens",
            "256",
            "--steps",
            "1",
            "--seconds",
            "0",
        ]
        options += [
            "--micro-batches",
            "2",
            "--no-profile",
            "--out",
            str(tmp_path),
            "--models",
            *models,
            *others,
        ]
        monkeypatch.setattr(sys, "argv", ["bench_step.py", *options])
        assert bench_step.main() == 0
        return json.loads((tmp_path / "bench_step_lengths.json").read_text())["rows"]

    rows = call("standard", "shared")
    standard, shared = "standard", "shared"
    assert measured == [(standard, 1, ""), (shared, 1, standard), (standard, 2, ""), (shared, 2, standard)]
    cut, whole = [row for row in rows if "step_ms" in row], [row for row in rows if "whole_ms" in row]
    assert [row["step_ms"] for row in cut] == [3000, 2000, 4000, 3000]
    assert [row["speed_up"] for row in cut] == [1, 1.5, 1, pytest.approx(4 / 3)]
    assert [(row["sequences"], row["micro_batch"], row["vocab"], row["indexer"]) for row in cut[:2]] == [
        (2, 1, 64, "none"),
        (2, 1, 64, "alike 0.78"),
    ]
    assert cut[1]["r"] == pytest.approx(1, abs=0.5), "one selection for all, and their windows"
    assert cut[1]["mean_k"] > 1
    assert [(row["layer_ms"], row["whole_ms"], row["whole_speed_up"]) for row in whole] == [
        (1000, 12000, 1),
        (1000, 11000, pytest.approx(12 / 11)),
    ]

    measured.clear()
    full.append("gsa")
    rows = call("shared", "gsa", "gsa_rope", "standard")
    rope = "gsa_rope"
    assert measured == [(rope, 1, standard), (rope, 2, standard)]
    assert [row["failed"] for row in rows if row["model"] == "gsa"] == ["out of memory: no room"] * 2
    assert len([row for row in rows if "whole_ms" in row]) == 3
    measured.clear()
    assert call("gsa", "gsa_rope", "shared", "standard") == rows
    assert measured == []

    rows = call("standard", "gsa_rope_reuse")
    reuse = "gsa_rope_reuse"
    assert measured == [(standard, 4, ""), (reuse, 4, standard), (standard, 8, ""), (reuse, 8, standard)]
    (whole,) = [row for row in rows if "whole_ms" in row and row["model"] == reuse]
    assert whole["layer_ms"] == 1000, "of whole groups"

    measured.clear()
    rows = call("standard", "shared", others=("--layers", "10"))
    assert measured == [(standard, 10, ""), (shared, 10, standard)]
    (whole,) = [row for row in rows if "whole_ms" in row and row["model"] == shared]
    (in_turns,) = [
        row["speed_up"] for row in rows if (row["model"], row["layers"]) == (shared, 10) and "r" in row
    ]
    assert (whole["layer_ms"], whole["whole_ms"], whole["whole_speed_up"]) == (None, 11000, in_turns)


def test_a_depth_that_no_shape_has_is_refused(monkeypatch, capsys, tmp_path):
    import bench_step

    stand_in_for_cuda(monkeypatch)
    words = ["--lengths", "128", "--shapes", "1.7b", "--layers", "25", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words])
    assert bench_step.main() == 2
    assert capsys.readouterr().err == "--layers 25: the shape 1.7b has 24; give 1 to 24\n"
    assert not list(tmp_path.iterdir())
