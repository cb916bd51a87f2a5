"""Tests the z-loss of the output layer against plain torch in fp64, on one rank and on two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gsa_train.config.checks import check_config
from gsa_train.metrics.record import Measured, reduce_step
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.step import evaluation_step
from helpers.runs import run_script
from helpers.single_rank import (
    SPARSE,
    random_batches,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
    token_losses,
)
from helpers.z_loss_ranks import check_losses


def test_losses_and_gradients_are_plain_torchs() -> None:
    pytest.importorskip("triton")
    check_losses(single_rank().groups.tp)


@pytest.mark.slow
def test_two_ranks_share_the_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_script(["tests/helpers/z_loss_ranks.py"], tmp_path / "log", ranks=2)


def test_a_step_trains_with_the_z_loss_and_logs_it_apart() -> None:
    config, plain = tiny_config(train={"z_loss_coeff": 0.1}), tiny_config()
    batches = random_batches(config)
    (found, gradients), (expected, without) = (
        step_gradients(tiny_model(each), SPARSE, batches, each, measures=True) for each in (config, plain)
    )
    assert found.loss_sum == expected.loss_sum  # of the cross-entropy alone, to the last bit
    assert expected.z_loss_sum is None
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    losses = [token_losses(model, batch)[1] * batch.loss_mask for batch in batches]
    z_loss = torch.stack(losses).sum() / found.loss_tokens
    (gradient,) = torch.autograd.grad(z_loss, [model.gpt.output_layer.weight])
    name = "output_layer.weight"
    torch.testing.assert_close(gradients[name] - without[name], gradient, rtol=1e-4, atol=1e-6)
    measured = Measured(causal_keys=found.causal_keys, z_loss_sum=found.z_loss_sum)
    reduced = reduce_step(model.runtime.stats, found.loss_sum, found.loss_tokens, measured, single_rank())
    assert reduced.z_loss == pytest.approx(z_loss.item(), rel=1e-6)
    result = take_step(model, optimizer, batches, config, lr=1e-2)
    assert result.z_loss_sum is None  # of a step that is not logged
    close_optimizer(model, optimizer)
    scored = [evaluation_step(tiny_model(each), batches, each, single_rank())[0] for each in (config, plain)]
    assert scored[0] == scored[1]


def test_a_negative_factor_is_refused() -> None:
    config = tiny_config()
    train = dataclasses.replace(config.train, z_loss_coeff=-0.1)
    (line,) = check_config(dataclasses.replace(config, train=train), world_size=1)
    assert line == "train.z_loss_coeff = -0.1: negative; give 0 or more"
