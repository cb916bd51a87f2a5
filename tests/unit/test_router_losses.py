"""Compares gradients of a router's losses with autograd of their definitions, for any micro-batches. The losses are
means over the tokens of the global batch, times their coefficients."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gsa_train.model.moe.routing import balance_loss, expert_counts
from helpers.single_rank import DENSE, random_batches, step_gradients, tiny_config, tiny_model

LOADS = torch.tensor([0.3, 0.05, 0.05, 0.1, 0.2, 0.1, 0.15, 0.05])
SIZES = {"experts": 8, "expert_ffn_hidden_size": 8, "first_dense_layers": 1}
ROUTER = "decoder.layers.1.mlp.router.weight"


def gradient(balance: float, z: float, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of the last layer's router, its weight, and its input, [T, d]."""
    moe = {**SIZES, "balance_coeff": balance, "z_loss_coeff": z}
    config = tiny_config([DENSE], moe=moe, train={"micro_batch_size": size})
    model = tiny_model(config)
    (router,) = model.routers
    router.loads.copy_(LOADS)
    weight, seen = router.weight.detach().clone(), []
    router.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach().flatten(0, 1)))
    _, gradients = step_gradients(model, DENSE, random_batches(config), config)
    return gradients[ROUTER], weight, torch.cat(seen)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_their_gradients_match_the_definitions(size: int) -> None:
    without, weight, hidden = gradient(0.0, 0.0, size)
    weight.requires_grad_()
    logits = hidden @ weight.T
    balance = 8 * (logits.softmax(-1) * LOADS).sum(-1).mean()
    z = logits.exp().sum(-1).log().square().mean()
    of_balance, of_z = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (balance, z))
    assert min(of_balance.abs().max(), of_z.abs().max()) > 0.01
    found, _, _ = gradient(0.7, 0.0, size)
    torch.testing.assert_close(found - without, 0.7 * of_balance, rtol=1e-4, atol=1e-6)
    found, _, _ = gradient(0.0, 0.3, size)
    torch.testing.assert_close(found - without, 0.3 * of_z, rtol=1e-4, atol=1e-6)


def test_transformers_coefficient_is_another_one() -> None:
    """transformers' coefficient is ours times top_k, of the means over all layers, as `moe.balance_coeff` says."""
    layers, top_k = 3, 2
    logits = torch.randn(500, 8)
    scores = logits.softmax(-1)
    loads = expert_counts(logits.topk(top_k).indices, 8) / (500 * top_k)
    ours = balance_loss(scores, loads) / 500
    theirs = load_balancing_loss_func((logits,) * layers, 8, top_k)
    torch.testing.assert_close(theirs, top_k * ours)
    of_all_layers = layers * ours
    torch.testing.assert_close(1e-3 * theirs, 1e-3 * top_k / layers * of_all_layers)
    even = torch.full((8,), 1 / 8)
    torch.testing.assert_close(balance_loss(even[None], even), torch.tensor(1.0))
