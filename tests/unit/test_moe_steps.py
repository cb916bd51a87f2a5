"""Tests steps of a mixture of experts: what changes its routers, and that a checkpoint contains it."""

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
        found.append((result.loss_sum, gradients, balances(model)))
    (loss, gradients, held), (other_loss, other_gradients, other_held) = found
    assert torch.equal(loss, other_loss)
    assert held == other_held
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_losses_of_the_router_do_not_depend_on_micro_batches() -> None:
    """The order of micro-batches does not matter either, because the loads come from the previous step."""
    gradients = []
    for size in (1, 4):
        config = tiny_config(
            moe={**BALANCED, "balance_coeff": 1.0, "z_loss_coeff": 1.0}, train={"micro_batch_size": size}
        )
        model = tiny_model(config)
        for router in model.routers:
            router.loads.copy_(torch.linspace(0, 0.25, 8))
        _, found = step_gradients(model, SPARSE, random_batches(config), config)
        gradients.append({name: each for name, each in found.items() if ".router." in name})
    for name, each in gradients[0].items():
        torch.testing.assert_close(each, gradients[1][name], rtol=1e-5, atol=1e-6)


def test_no_experts_is_todays_model() -> None:
    """The fields of experts do not reach a dense model: megatron-core's config is the default's."""
    model = tiny_model(tiny_config())
    assert model.mcore_config.num_moe_experts is None
    assert model.mcore_config.moe_ffn_hidden_size is None
    assert not any("expert" in name or "router" in name for name, _ in model.gpt.named_parameters())
