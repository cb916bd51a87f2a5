"""Tests steps of a mixture of experts: what changes its routers, and the gradients of their losses."""

from typing import Any

import pytest
import torch

from gsa_data.pack import FILLER
from gsa_train.data.batches import to_micro_batch
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import enter_phase
from gsa_train.step import evaluation_step
from helpers.single_rank import (
    DENSE,
    EOS,
    SPARSE,
    WARM_UP,
    named_weights,
    random_batches,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
    token_losses,
)

BALANCED: dict[str, Any] = {"experts": 8, "expert_ffn_hidden_size": 8, "shared_expert_ffn_hidden_size": 8}
BIASED = {**BALANCED, "balancing": "aux_free", "router_score": "sigmoid"}
BOTH = pytest.mark.parametrize("moe", [BALANCED, BIASED], ids=["balanced", "biased"])


def balances(model: Model) -> list[list[float]]:
    return [held.tolist() for router in model.routers for held in router.balance()]


@BOTH
def test_filler_counts_and_all_of_it_goes_one_way(moe: dict[str, Any]) -> None:
    config = tiny_config(moe=moe)
    model = tiny_model(config)
    enter_phase(model, SPARSE)
    length = config.train.seq_len_tokens
    blocks = torch.full((2, length + 1), FILLER, dtype=torch.int32)
    blocks[:, 0] = EOS
    token_losses(model, to_micro_batch(blocks, EOS, attend_across_documents=False))
    for router in model.routers:
        assert sorted(router.counts.tolist())[-config.moe.top_k :] == [2 * length] * config.moe.top_k


@BOTH
def test_the_indexer_warm_up_and_validation_leave_the_base_and_the_routers_alone(moe: dict[str, Any]) -> None:
    config = tiny_config([WARM_UP, SPARSE], moe=moe)
    model = tiny_model(config)
    before, weights = balances(model), named_weights(model)
    optimizer = build_optimizer(model, WARM_UP, config)
    take_step(model, optimizer, random_batches(config), config, lr=1e-2)
    evaluation_step(model, random_batches(config), config, single_rank())
    assert balances(model) == before
    assert not any(router.counts.any() for router in model.routers)
    moved = {name for name, each in named_weights(model).items() if not torch.equal(weights[name], each)}
    assert moved
    assert all(".indexer." in name for name in moved)
    close_optimizer(model, optimizer)


@BOTH
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_nothing(moe: dict[str, Any], recompute: str) -> None:
    found = []
    for how in ("none", recompute):
        config = tiny_config(moe=moe, train={"recompute": how})
        model = tiny_model(config)
        result, gradients = step_gradients(model, SPARSE, random_batches(config), config)
        found.append((result.loss_sum.item(), gradients, balances(model)))
    (loss, gradients, held), (other_loss, other_gradients, other_held) = found
    assert (loss, held) == (other_loss, other_held)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


# --- losses of the router: means over the tokens of the global batch, times their coefficients --------------

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
def test_gradients_of_the_router_s_losses_match_the_definitions(size: int) -> None:
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
