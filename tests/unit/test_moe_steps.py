"""Tests what changes the routers of a mixture of experts. test_step.py and test_recompute.py have its steps."""

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
