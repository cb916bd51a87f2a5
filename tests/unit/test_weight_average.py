"""Tests the moving average of the weights against its formula. test_checkpoint_optimizer.py tests that it arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gsa_eval.convert.average_weights import average_weights
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.optimizer.build import WEIGHT_AVERAGE
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.run_folder.resume import ResumeError, start_from
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model

DECAY = 0.8


def weights_and_averages(optimizer: PhaseOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    states = [each for updater in optimizer.updaters for each in updater.state.items()]
    averages = [state[WEIGHT_AVERAGE].clone() for _, state in states if WEIGHT_AVERAGE in state]
    return [weight.detach().clone() for weight, _ in states], averages


@pytest.mark.parametrize(
    ("distributed", "precision", "optimizer_name"),
    [(True, "bf16", "adamw"), (False, "fp32", "adamw"), (True, "bf16", "muon"), (False, "fp32", "muon")],
)
def test_each_steps_average_is_the_formula(distributed: bool, precision: str, optimizer_name: str) -> None:
    train = {"precision": precision, "weight_average_decay": DECAY, "optimizer": optimizer_name}
    config = tiny_config([SPARSE], parallel={"distributed_optimizer": distributed}, train=train)
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    history: list[list[torch.Tensor]] = []
    for seed in range(5):
        batches = random_batches(config, seed)
        if seed == 3:  # a rejected update changes neither weights nor average
            batches = [replace(each, loss_mask=each.loss_mask * torch.nan) for each in batches]
        take_step(model, optimizer, batches, config, lr=1e-2)
        weights, averages = weights_and_averages(optimizer)
        if seed != 3:
            history.append(weights)
        shares = torch.tensor([DECAY**age for age in reversed(range(len(history)))]).double()
        for position, average in enumerate(averages):
            of_steps = torch.stack([each[position].double() for each in history])
            expected = torch.einsum("s,s...->...", shares / shares.sum(), of_steps)
            torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
    assert (len(history), optimizer.updates) == (4, 4)
    close_optimizer(model, optimizer)


def test_a_checkpoint_without_an_average_starts_one_at_its_weights(tmp_path: Path) -> None:
    for decay in (0.0, DECAY):
        config = tiny_config([SPARSE], train={"precision": "bf16", "weight_average_decay": decay})
        model = tiny_model(config)
        optimizer = build_optimizer(model, SPARSE, config)
        if decay == 0:
            take_step(model, optimizer, random_batches(config), config, lr=1e-2)
            checkpoint = write_checkpoint(tmp_path, 1, model, optimizer, config)
        else:
            load_checkpoint(checkpoint, model, optimizer, single_rank(), with_optimizer=True)
            weights, averages = weights_and_averages(optimizer)
            assert all(torch.equal(*pair) for pair in zip(weights, averages, strict=True))
        close_optimizer(model, optimizer)


def test_a_checkpoint_before_the_first_variance_is_not_averaged(tmp_path: Path) -> None:
    """Before the indexer runs, the mean variance is 0, which would lower the average and so all budgets."""
    config = tiny_config([SPARSE])
    models = [tiny_model(config, variance_ema=variance) for variance in (0.0, 0.02, 0.04)]
    saved = [write_checkpoint(tmp_path, step, model, None, config) for step, model in enumerate(models, 1)]
    with pytest.raises(ValueError, match="step_00000003: only in one has the indexer run"):
        average_weights([saved[0], saved[2]], tmp_path / "no", moving=False)
    average_weights(saved[1:], tmp_path / "out", moving=False)
    average_weights(saved[:1] * 2, tmp_path / "same", moving=False)
    with pytest.raises(ResumeError, match=r"out has weights alone.*checkpoint\.initial_weights="):
        start_from(tmp_path / "out", config, phase_ranges(config.phases), [])
