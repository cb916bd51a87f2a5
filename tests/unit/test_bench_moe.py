"""Tests that the bench of experts continues when a model fails, and that megatron-core's model has no experts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.optimizer.micro_batch_graph import CaptureError
from helpers.bench_without_cuda import stand_in_for_cuda
from helpers.single_rank import single_rank, tiny_config
from whole_steps.megatron_peer import unsupported_by_megatron


def test_megatrons_model_refuses_experts() -> None:
    config = tiny_config(moe={"experts": 8, "top_k": 3, "expert_ffn_hidden_size": 16})
    assert "Transformer Engine" in unsupported_by_megatron(config), "and not a dense model in its place"


@pytest.mark.nightly
def test_the_bench_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that do not fit, or cannot be captured, say so, and the others continue."""
    import bench_moe

    stand_in_for_cuda(monkeypatch)
    monkeypatch.setattr(bench_moe, "init_parallel", lambda *_, **__: single_rank())
    monkeypatch.setattr(bench_moe, "shutdown_parallel", lambda: None)  # it serves other tests, too
    take_turn = bench_moe.take_turn

    def take_or_fail(found: Any, *rest: Any) -> None:
        if found.config.train.cuda_graphs and found.config.gsa.attention == "dense":
            raise CaptureError("the remedy") from RuntimeError("not allowed\nin a capture")
        if found.config.train.cuda_graphs:
            raise torch.OutOfMemoryError("no room\nfor more")
        take_turn(found, *rest)

    monkeypatch.setattr(bench_moe, "take_turn", take_or_fail)
    monkeypatch.setattr(bench_moe, "release_memory", lambda _: 0)
    small = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 64}
    options = [f"model.{name}={size}" for name, size in small.items()]
    options += ["moe.expert_ffn_hidden_size=16", "moe.shared_expert_ffn_hidden_size=16", "moe.top_k=2"]
    options += ["gsa.indexer_dim=16", "gsa.k_base=8", "gsa.k_min=4", "gsa.k_max=16"]
    options += ["train.seq_len_tokens=32", "train.precision=bf16", "--no-profile", "--layers", "1"]
    options += ["--experts", "4", "--sequences", "2", "--rounds", "2", "--warm-up-steps", "0", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_moe.py", "--out", str(tmp_path), *options])
    assert bench_moe.main() == 1
    report = json.loads((tmp_path / "bench_moe.json").read_text())
    rows = {row["model"]: row for row in report["rows"]}
    without = {name for name, row in rows.items() if row["ratio"] is None}
    assert without == {"standard_graphs", "gsa_graphs"}
    assert rows["gsa_graphs"]["failed"] == "out of memory: no room"
    assert report["failures"] == ["standard_graphs: no graph: not allowed"]
