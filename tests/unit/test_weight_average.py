"""Tests the moving average of the weights against the formula, from step to step and through checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.config import Config
from gsa_train.optimizer.build import WEIGHT_AVERAGE
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model

DECAY = 0.8


def config_of(distributed: bool, precision: str, decay: float = DECAY) -> Config:
    train = {"precision": precision, "weight_average_decay": decay}
    return tiny_config([SPARSE], parallel={"distributed_optimizer": distributed}, train=train)


def weights_and_averages(optimizer: PhaseOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy the fp32 weights and their averages."""
    states = [each for updater in optimizer.updaters for each in updater.state.items()]
    averages = [state[WEIGHT_AVERAGE].clone() for _, state in states if WEIGHT_AVERAGE in state]
    return [weight.detach().clone() for weight, _ in states], averages


KINDS = [(True, "bf16"), (False, "fp32")]


@pytest.mark.parametrize(("distributed", "precision"), KINDS)
def test_the_average_is_the_formula_and_arrives_in_another_optimizer(
    distributed: bool, precision: str, tmp_path: Path
) -> None:
    config = config_of(distributed, precision)
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    history: list[list[torch.Tensor]] = []
    for seed in range(5):
        batches = random_batches(config, seed)
        if seed == 3:  # a rejected update changes neither weights nor average
            batches = [replace(each, loss_mask=each.loss_mask * torch.nan) for each in batches]
        before = weights_and_averages(optimizer)[1]
        result = take_step(model, optimizer, batches, config, lr=1e-2)
        weights, averages = weights_and_averages(optimizer)
        if seed == 3:
            assert not result.verdict.applied
            assert all(map(torch.equal, averages, before))
            continue
        history.append(weights)
        shares = torch.tensor([DECAY**age for age in reversed(range(len(history)))]).double()
        for position, average in enumerate(averages):
            of_steps = torch.stack([each[position].double() for each in history])
            expected = torch.einsum("s,s...->...", shares / shares.sum(), of_steps)
            torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights[0], averages[0])
    checkpoint = write_checkpoint(tmp_path, 5, model, optimizer, config)
    close_optimizer(model, optimizer)

    other = config_of(not distributed, "fp32")
    model = tiny_model(other)
    optimizer = build_optimizer(model, SPARSE, other)
    load_checkpoint(checkpoint, model, optimizer, single_rank(), with_optimizer=True)
    arrived = weights_and_averages(optimizer)[1]
    total = sum(each.double().sum() for each in averages)
    assert sum(each.double().sum() for each in arrived) == pytest.approx(total.item(), rel=1e-12)
    assert optimizer.updates == 4
    close_optimizer(model, optimizer)


def test_a_checkpoint_without_an_average_starts_one_at_its_weights(tmp_path: Path) -> None:
    without = config_of(True, "bf16", decay=0.0)
    model = tiny_model(without)
    optimizer = build_optimizer(model, SPARSE, without)
    assert weights_and_averages(optimizer)[1] == []
    take_step(model, optimizer, random_batches(without), without, lr=1e-2)
    checkpoint = write_checkpoint(tmp_path, 1, model, optimizer, without)
    close_optimizer(model, optimizer)

    config = config_of(True, "bf16")
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    load_checkpoint(checkpoint, model, optimizer, single_rank(), with_optimizer=True)
    weights, averages = weights_and_averages(optimizer)
    assert all(map(torch.equal, weights, averages))
    close_optimizer(model, optimizer)
