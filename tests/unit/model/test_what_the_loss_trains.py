"""Tests that the indexer loss trains only the indexer, at the specified scale."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gsa_train.config import PhaseConfig
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    named_weights,
    random_batches,
    read_stats,
    step_gradients,
    tiny_config,
    tiny_model,
)

CONFIG = tiny_config()
DENSE_ALL = PhaseConfig(name="dense", attention="dense", train="all", kl_coeff=0.7)


def gradients(phase: PhaseConfig) -> dict[str, torch.Tensor]:
    return step_gradients(tiny_model(CONFIG, variance_ema=0.02), phase, random_batches(CONFIG), CONFIG)[1]


def is_indexer(name: str) -> bool:
    return ".indexer." in name


def test_language_model_loss_does_not_reach_the_indexer() -> None:
    found = gradients(dataclasses.replace(SPARSE, kl_coeff=0.0))
    for name, gradient in found.items():
        assert bool(gradient.any()) != is_indexer(name), name


def test_indexer_loss_does_not_reach_the_base() -> None:
    with_loss = gradients(dataclasses.replace(SPARSE, kl_coeff=5.0))
    without_loss = gradients(dataclasses.replace(SPARSE, train="base"))
    base = {name for name in with_loss if not is_indexer(name)}
    assert without_loss.keys() == base
    for name in base:
        assert torch.equal(with_loss[name], without_loss[name]), name
    assert all(with_loss[name].any() for name in with_loss if is_indexer(name))


@pytest.mark.parametrize("phase", [DENSE_ALL, WARM_UP], ids=lambda phase: phase.name)
def test_indexer_gradient_matches_lambda_times_the_mean_kl_over_queries_and_layers(
    phase: PhaseConfig,
) -> None:
    """The test uses finite differences of the logged KL, and dense attention, where no selection changes."""
    weights = named_weights(tiny_model(CONFIG))
    generator = torch.Generator().manual_seed(5)
    direction = {
        name: torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
        if is_indexer(name)
    }

    def mean_kl(distance: float) -> float:
        model = tiny_model(CONFIG)
        moved = {name: weights[name] + distance * step for name, step in direction.items()}
        model.gpt.load_state_dict({**weights, **moved}, strict=False)
        step_gradients(model, phase, random_batches(CONFIG), CONFIG, measures=True)
        layers = read_stats(model)["indexer_kl"]
        return sum(layers) / len(layers)

    slope = (mean_kl(2e-3) - mean_kl(-2e-3)) / 4e-3
    found = gradients(phase)
    projected = sum((found[name] * step).sum().item() for name, step in direction.items())
    assert projected == pytest.approx(phase.kl_coeff * slope, rel=1e-3)
    assert abs(slope) > 1e-3
