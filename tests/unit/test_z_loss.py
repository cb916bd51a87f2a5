"""Tests the z-loss of the output layer: its losses and gradients against plain torch in fp64, and its use in a step.
The layout tests also train with the z-loss."""

from __future__ import annotations

import pytest
import torch

from gsa_train.config import TrainConfig
from gsa_train.losses import cross_entropy, training_losses
from gsa_train.metrics.record import Measured, send_step
from gsa_train.phases import enter_phase
from gsa_train.step import evaluation_step
from helpers.single_rank import (
    SPARSE,
    random_batches,
    single_rank,
    step_gradients,
    tiny_config,
    tiny_model,
    token_losses,
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_losses_and_gradients_are_plain_torchs(fused: bool, dtype: torch.dtype, tolerance: float) -> None:
    if fused:
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(1)
    leaf = (3 * torch.randn(6, 2, 40, generator=generator)).to(dtype).requires_grad_()  # [L, B, V]
    labels = torch.randint(40, (2, 6), generator=generator)
    grads = torch.rand(2, 2, 6, generator=generator)
    exact = leaf.detach().double().requires_grad_()
    nats = torch.nn.functional.cross_entropy(exact.permute(1, 2, 0), labels, reduction="none")
    expected = torch.stack([nats, 0.3 * exact.logsumexp(-1).square().t()])
    expected.backward(grads.double())
    given = (labels, single_rank().groups.tp, fused, TrainConfig(z_loss_coeff=0.3))
    for objective in (cross_entropy, lambda *args: cross_entropy(*args)):
        leaf.grad = None
        losses = training_losses(objective, leaf * 1, *given)
        losses.backward(grads)
        torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_a_step_trains_with_the_z_loss_and_logs_it_apart() -> None:
    config, plain = tiny_config(train={"z_loss_coeff": 0.1}), tiny_config()
    batches = random_batches(config)
    (found, gradients), (expected, without) = (
        step_gradients(tiny_model(each), SPARSE, batches, each, measures=True) for each in (config, plain)
    )
    assert found.loss_sum == expected.loss_sum  # of the cross-entropy alone, to the last bit
    assert expected.z_loss_sum is None
    model = tiny_model(config)
    enter_phase(model, SPARSE)
    losses = [token_losses(model, batch)[1] * batch.loss_mask for batch in batches]
    z_loss = torch.stack(losses).sum() / found.loss_tokens
    name, weight = "output_layer.weight", model.gpt.output_layer.weight
    (gradient,) = torch.autograd.grad(z_loss, [weight])
    torch.testing.assert_close(gradients[name] - without[name], gradient, rtol=1e-4, atol=1e-6)
    measured = Measured(causal_keys=found.causal_keys, z_loss_sum=found.z_loss_sum)
    reduced = send_step(model.runtime.stats, found.loss_sum, found.loss_tokens, measured, single_rank())()
    assert reduced.z_loss == pytest.approx(z_loss.item(), rel=1e-6)
    scored = [evaluation_step(tiny_model(each), batches, each, single_rank())[0] for each in (config, plain)]
    assert scored[0] == scored[1]
