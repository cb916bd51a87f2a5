"""Adds a second optimizer and a second objective, and tests what depends on them; test_recipes.py adds all rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.model import gates
from gsa_train.model.mcore.config import to_mcore_config
from gsa_train.optimizer.build import OPTIMIZERS, Group, OptimizerKind
from gsa_train.optimizer.main_weights import carry_over, keep_main_weights
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.planning.choices import unknown_choices
from gsa_train.planning.memory.estimate import checkpoint_bytes
from gsa_train.run_folder.resume import ResumeError, _check_same_phases
from helpers.checkpoints import run_state, write_checkpoint
from helpers.single_rank import (
    SPARSE,
    named_weights,
    random_batches,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
)

LR = 1e-2


def sgd(groups: list[Group], train: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=fused)


def sgd_change(states: list[dict[str, torch.Tensor]], group: Group, parameters: Any) -> torch.Tensor:
    """Return the change without weight decay, which torch's SGD adds to the gradients: w' - w = -lr m."""
    return sum((group["lr"] * state["momentum_buffer"]).double().square().sum() for state in states)


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sgd", OptimizerKind(sgd, sgd_change, state=("momentum_buffer",)))


@pytest.mark.usefixtures("momentum")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "plain"])
def test_an_optimizer_trains_saves_and_resumes_bit_for_bit(sharded, precision, tmp_path):
    train = {"optimizer": "sgd", "precision": precision, "weight_decay": 0.0}
    config = tiny_config(train=train, parallel={"distributed_optimizer": sharded})
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    before = named_weights(model)
    changed = take_step(model, optimizer, random_batches(config, 0), config, LR, measures=True).update_norm
    take_step(model, optimizer, random_batches(config, 1), config, LR)
    if precision == "fp32":
        _, gradients = step_gradients(tiny_model(config), SPARSE, random_batches(config, 0), config)
        rates = {name: 10 if ".indexer." in name else 1 for name in gradients}
        steps = torch.stack([(rates[name] * LR * each).norm() for name, each in gradients.items()])
        torch.testing.assert_close(changed, steps.norm())  # proportional to the gradient, unlike AdamW's
    folder = write_checkpoint(tmp_path, 2, model, optimizer, config)

    loaded = tiny_model(dataclasses.replace(config, run=dataclasses.replace(config.run, seed=99)))
    resumed = build_optimizer(loaded, SPARSE, config)
    load_checkpoint(folder, loaded, resumed, single_rank(), with_optimizer=True)
    assert resumed.updates == 2
    for either, its in ((model, optimizer), (loaded, resumed)):
        for seed in (7, 8):
            take_step(either, its, random_batches(config, seed), config, LR)
    for name, weight in named_weights(model).items():
        assert torch.equal(weight, named_weights(loaded)[name]), name
        assert not torch.equal(weight, before[name]), name
    kept = keep_main_weights(model, optimizer)
    close_optimizer(model, optimizer)
    carry_over(kept, build_optimizer(model, SPARSE, config))

    adamw = dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer="adamw"))
    with pytest.raises(
        ResumeError, match=r"holds the state of train.optimizer = sgd; the config has adamw\."
    ):
        _check_same_phases(adamw.train, run_state(2, config), phase_ranges(config.phases), folder)
    states = [checkpoint_bytes(each, SPARSE) for each in (config, adamw)]
    assert states[1] - states[0] == 4 * sum(weight.numel() for weight in before.values())


def test_a_gate_that_the_layer_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gates.gate_rows
    monkeypatch.setattr(gates, "ON_HEADS", (*gates.ON_HEADS, "sixth"))
    monkeypatch.setattr(gates, "gate_rows", lambda *sizes: rows(*sizes) | {"sixth": 2})
    config = to_mcore_config(tiny_config(), single_rank())
    with pytest.raises(ValueError, match=r"gates \['sixth'\] have rows and no field; add it to GateLogits"):
        gates.split_gate_logits(torch.zeros(1, gates.head_gate_rows(config)), config)


def test_a_name_that_no_table_has_is_a_line_that_lists_the_names() -> None:
    train = {"optimizer": "lion", "objective": "focal", "linear_layers": "fp4"}
    config = tiny_config([dataclasses.replace(SPARSE, decay="step")], train=train)
    assert unknown_choices(config) == [
        "train.linear_layers = fp4: no such name; give one of fp8, megatron",
        "train.objective = focal: no such name; give one of cross_entropy",
        "train.optimizer = lion: no such name; give one of adamw, muon",
        "phases.0.decay = step: no such name; give one of cosine, linear, constant, inverse_sqrt, wsd",
    ]
