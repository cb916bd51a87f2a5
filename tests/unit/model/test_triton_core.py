"""The fused core trains what the reference core trains: loss, every gradient, every statistic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsa_train.config import PhaseConfig
from gsa_train.model.triton_core import TritonCore, document_starts
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    step_gradients,
    tiny_config,
    tiny_model,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "window, rope and reuse": {
        "local_window": 5,
        "indexer_rope": True,
        "selection_reuse": 2,
        "adaptive_k": "direct",
    },
    "sparse-only": {
        "indexer_activation": "relu",
        "value_gate": False,
        "output_gate": False,
        "adaptive_k": "off",
    },
    "learned temperature": {"indexer_temperature": "learned"},
}
DENSE_ALL = PhaseConfig(name="dense", attention="dense", train="all", steps=10, lr=1e-2, min_lr=1e-3)


def one_step(
    gsa: dict[str, Any], phase: PhaseConfig, fused: bool, recompute: str = "none"
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, list[float]], list[torch.Tensor]]:
    config = tiny_config(
        [phase],
        model={"head_dim": 32, "init_std": 0.2},
        gsa={"indexer_dim": 16, "indexer_heads": 2, **gsa},
        train={"seq_len_tokens": 24, "global_batch_size": 2, "recompute": recompute},
    )
    model = tiny_model(config, variance_ema=0.01)
    if fused:
        for attention in model.attentions:
            attention.core = TritonCore(attention)
    model.runtime.measuring = True
    result, gradients = step_gradients(model, phase, random_batches(config), config)
    averages = [a.variance.ema.clone() for a in model.attentions if a.variance is not None]
    return result.loss_sum, gradients, read_stats(model), averages


def assert_same_step(fused: tuple, reference: tuple) -> None:
    loss, gradients, stats, averages = fused
    expected_loss, expected_gradients, expected_stats, expected_averages = reference
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, expected in expected_gradients.items():
        error = (gradients[name] - expected).norm() / expected.norm()
        assert error < 1e-4, (name, error)
    assert stats.keys() == expected_stats.keys()
    for name, expected in expected_stats.items():
        assert stats[name] == pytest.approx(expected, rel=1e-4, nan_ok=True), name
    torch.testing.assert_close(averages, expected_averages, rtol=1e-5, atol=0)


CASES = [  # each option once: the interpreter is slow
    ("paper", SPARSE),
    ("window, rope and reuse", SPARSE),
    ("sparse-only", SPARSE),
    ("learned temperature", WARM_UP),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "phase"), CASES, ids=[f"{v}-{p.name}" for v, p in CASES])
def test_one_step_is_that_of_the_reference(variant: str, phase: PhaseConfig) -> None:
    gsa = VARIANTS[variant]
    assert_same_step(one_step(gsa, phase, fused=True), one_step(gsa, phase, fused=False))


@pytest.mark.slow
def test_the_gated_baseline_runs_on_the_dense_kernel() -> None:
    gsa = {"attention": "dense"}
    assert_same_step(one_step(gsa, DENSE_ALL, fused=True), one_step(gsa, DENSE_ALL, fused=False))


@pytest.mark.slow
def test_recomputing_the_core_changes_nothing() -> None:
    once, twice = (one_step({}, SPARSE, fused=True, recompute=mode) for mode in ("none", "selective"))
    assert torch.equal(once[0], twice[0])
    assert all(torch.equal(once[1][name], twice[1][name]) for name in once[1])
    assert once[2] == twice[2]


def test_document_starts() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    expected = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    starts = document_starts(ids)
    assert starts is not None
    assert torch.equal(starts, expected)
    assert starts.dtype == torch.int32
    assert document_starts(None) is None
