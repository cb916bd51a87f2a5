"""Runs benches at sizes for the interpreter and CPUs: measurements, checks and output. Times are invented."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cases
import harness
import pytest
import torch
from torch.nn.attention import SDPBackend

pytestmark = pytest.mark.nightly


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benches small enough for the interpreter. Their checks run, and every time is a second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = cases.Shape("1.7B", 2, 1, 32)
    sizes = {"USUAL": ["1.7B"], "INDEXER_HEADS": 2, "INDEXER_SIZE": 16, "K_BASE": 24, "K_MIN": 8, "K_MAX": 32}
    for name, value in (
        sizes | {"DEVICE": device, "DTYPE": torch.float32, "SHAPES": {"1.7B": shape}}
    ).items():
        monkeypatch.setattr(cases, name, value)
    for name in ("cudnn", "flash"):
        dense = getattr(cases, name)
        monkeypatch.setattr(cases, name, lambda x, f=dense: replace(f(x), backend=SDPBackend.MATH))
    monkeypatch.setattr(harness, "require_cuda", lambda: None)
    monkeypatch.setattr(harness, "capture", lambda run: run)
    monkeypatch.setattr(harness, "peak_bytes", lambda run: (2**30, run()))
    monkeypatch.setattr(harness, "measure", lambda runs, **_: dict.fromkeys(runs, 1000.0))


@pytest.mark.usefixtures("tiny")
def test_bench_kl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_kl

    monkeypatch.setattr(bench_kl, "CHECKED_LENGTH", 40)
    assert call(monkeypatch, bench_kl, "--out", tmp_path, "--lengths", "40") == 0
    report = json.loads((tmp_path / "bench_kl.json").read_text())
    checks = [row for row in report["rows"] if "value_error" in row]
    assert [row["attended"] for row in checks] == ["all", "sparse"]
    assert len(report["rows"]) == 4


@pytest.mark.usefixtures("tiny")
def test_bench_long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_long

    monkeypatch.setattr(bench_long, "CHECKED_LENGTH", 40)
    assert call(monkeypatch, bench_long, "--out", tmp_path, "--lengths", "40", "--ratios", "2") == 0
    rows = json.loads((tmp_path / "bench_long.json").read_text())["rows"]
    check, _, _, token, token_selected, relu = rows
    assert check["relative_error"] < 1e-4
    assert token["both_kl_ms"] == 3000
    assert (token_selected["attention"], token_selected["forward_ms"]) == ("GSA token selected", 1000)
    assert (relu["attention"], relu["forward_reuse_ms"]) == ("GSA ReLU selected", 250)


@pytest.mark.usefixtures("tiny")
def test_bench_peers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_peers

    def top_k(scores: torch.Tensor, lengths: torch.Tensor, keys: int, **_: Any) -> dict[str, torch.Tensor]:
        hidden = torch.arange(scores.shape[1]) >= lengths[:, None]
        values, indices = scores.masked_fill(hidden, -torch.inf).topk(keys)
        return {"indices": indices.masked_fill(values == -torch.inf, -1).int()}

    cudnn = ModuleType("cudnn")
    cudnn.__spec__ = ModuleSpec("cudnn", None)
    monkeypatch.setattr(cudnn, "DSA", SimpleNamespace(indexer_top_k_wrapper=top_k), raising=False)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(bench_peers, "CHECKED_LENGTH", 128)
    names = ["dense cuDNN", bench_peers.TOP_K]
    options = ["--lengths", "128", "--keys", "32", "--only", *names]
    assert call(monkeypatch, bench_peers, "--out", tmp_path, *options) == 0
    rows = json.loads((tmp_path / "bench_peers.json").read_text())["rows"]
    assert [(row["peer"], row["tokens"], row["note"]) for row in rows] == [
        (name, 128, "") for name in (*names, names[1])
    ]
    assert [row["forward_ratio"] for row in rows] == [1, 1, 1]
    assert [row["both_ratio"] for row in rows] == [1, None, None]


def call(monkeypatch: pytest.MonkeyPatch, bench: Any, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", [f"{bench.__name__}.py", *map(str, words)])
    code: int = bench.main()
    return code


def test_a_planted_selection_is_what_the_layers_use() -> None:
    """Planted projections determine the selections. The model's own indexer still learns, from a loss over the planted
    selections."""
    from helpers.single_rank import SPARSE, random_batches, single_rank, tiny_config
    from whole_steps.planted_indexer import alike, plant
    from whole_steps.step_bench import OurTrainee

    config = tiny_config(
        [SPARSE],
        model={"init_std": 0.02},
        data={"attend_across_documents": True},
        train={"precision": "fp32"},
    )
    found = []

    def prepare(model: Any) -> None:
        found.extend(alike(each.indexer, 16, 0.5, seed) for seed, each in enumerate(model.attentions))
        plant(model, found, batch=2)
        for planted, attention in zip(found, model.attentions, strict=True):
            bias = attention.indexer.score_bias
            assert torch.equal(bias, planted.score_bias)
            given = attention.indexer(torch.randn(16, 2, 16).to(bias))
            assert torch.equal(given.keys[1], planted.projections.keys[0])

    trainee = OurTrainee(config, SPARSE, single_rank(), prepare)
    before = [each.indexer.key_weight.detach().clone() for each in trainee.model.attentions]
    trainee.step(random_batches(config, attend_across=True))
    for old, attention in zip(before, trainee.model.attentions, strict=True):
        assert not torch.equal(old, attention.indexer.key_weight)
    trainee.close()
    assert len(found) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_bench_without_its_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_decode

    with pytest.raises(SystemExit, match="No CUDA device here"):
        call(monkeypatch, bench_decode)
