"""Tests the bench of experts: megatron-core's mixture with our weights equals ours up to rounding."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.optimizer.micro_batch_graph import CaptureError
from helpers.bench_without_cuda import stand_in_for_cuda
from helpers.single_rank import DENSE, random_batches, single_rank, step_gradients, tiny_config, tiny_model
from whole_steps.megatron_experts import GroupedMLP, take_megatron_experts, unsupported_by_megatron_experts
from whole_steps.megatron_peer import unsupported_by_megatron

SIZES: dict[str, Any] = {
    "experts": 8,
    "top_k": 3,
    "expert_ffn_hidden_size": 16,
    "shared_expert_ffn_hidden_size": 8,
    "balance_coeff": 0.3,
    "z_loss_coeff": 0.1,
}
"""Coefficients so large that a wrong loss changes the gradients."""
WITH_GROUPED_MLP = pytest.mark.skipif(
    GroupedMLP is None, reason="megatron-core 0.19 groups no experts without TE"
)


def of_experts(gradients: dict[str, torch.Tensor], layer: int) -> list[torch.Tensor]:
    """Return gradients of both matrices, [experts, out, in], under any name."""
    of_layer = f"decoder.layers.{layer}.mlp.experts."
    mine = {
        name.removeprefix(of_layer): each for name, each in gradients.items() if name.startswith(of_layer)
    }
    if "weight1" in mine:
        shapes = (SIZES["experts"], 16, -1), (SIZES["experts"], SIZES["expert_ffn_hidden_size"], 16)
        pairs = zip(("weight1", "weight2"), shapes, strict=True)
        return [mine[name].view(shape).transpose(1, 2) for name, shape in pairs]
    return [mine["linear_fc1.weight"], mine["linear_fc2.weight"]]


@WITH_GROUPED_MLP
@pytest.mark.parametrize("router", [{}, {"router_score": "sigmoid", "routed_scale": 2.0}])
def test_megatrons_mixture_is_ours(router: dict[str, Any]) -> None:
    """Our balance loss uses the expert loads of the previous step, and megatron-core's loss the loads of the
    micro-batch. Our model takes the same step twice, so that its previous step has the loads of the micro-batch."""
    config = tiny_config([DENSE], moe={**SIZES, **router}, train={"global_batch_size": 2})
    batches = random_batches(config)
    ours = tiny_model(config, variance_ema=0.02)
    step_gradients(ours, DENSE, batches, config)
    expected, our_gradients = step_gradients(ours, DENSE, batches, config)

    theirs = tiny_model(config, variance_ema=0.02)
    assert take_megatron_experts(theirs) < 1e-5
    assert theirs.routers == []
    found, their_gradients = step_gradients(theirs, DENSE, batches, config)

    assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-6)
    assert found.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=1e-5)
    shared = our_gradients.keys() & their_gradients.keys()
    assert {name for name in our_gradients if ".mlp.experts." not in name} == shared
    pairs = [(our_gradients[name], their_gradients[name]) for name in sorted(shared)]
    for layer in range(config.model.num_layers):
        own = of_experts(our_gradients, layer), of_experts(their_gradients, layer)
        pairs += zip(*own, strict=True)
    for one, other in pairs:
        assert (one - other).norm() <= 1e-4 * one.norm()


@WITH_GROUPED_MLP
def test_what_cannot_be_compared_says_so() -> None:
    for moe, words in (
        ({"experts_impl": "sequential"}, "megatron-core's already"),
        ({"router_score": "sigmoid", "balancing": "aux_free", "balance_coeff": 1e-3}, "biases"),
        ({"capacity_factor": 1.0}, "capacities"),
    ):
        config = tiny_config(moe={**SIZES, "balance_coeff": 1e-3, **moe})
        assert words in unsupported_by_megatron_experts(config)
    assert "bench_moe.py" in unsupported_by_megatron(config), "and not a dense model in its place"


@WITH_GROUPED_MLP
@pytest.mark.nightly
def test_the_bench_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that do not fit, or cannot be captured, say so, and the others continue."""
    import bench_moe

    stand_in_for_cuda(monkeypatch)
    monkeypatch.setattr(bench_moe, "init_parallel", lambda *_, **__: single_rank())
    monkeypatch.setattr(bench_moe, "shutdown_parallel", lambda: None)  # it serves other tests, too
    take_turn = bench_moe.take_turn

    def take_or_fail(name: str, found: Any, *rest: Any) -> None:
        if name == "standard_grouped":
            raise torch.OutOfMemoryError("no room\nfor more")
        if name == "standard_graphs":
            raise CaptureError("the remedy") from RuntimeError("not allowed\nin a capture")
        if name == "gsa_graphs":
            train = replace(found.config.train, cuda_graphs=False)
            found.config = replace(found.config, train=train)
        take_turn(name, found, *rest)

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
    assert without == {"standard_graphs", "standard_grouped"}
    assert rows["standard_grouped"]["failed"] == "out of memory: no room"
    assert report["failures"] == ["standard_graphs: no graph: not allowed"]
