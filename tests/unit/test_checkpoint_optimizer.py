"""Tests four optimizers: plain or distributed, each in fp32 or bf16. A checkpoint of any of them must load into all
four. tests/resume/test_cool_down.py and tests/distributed/test_many_layouts.py test DeepSpeed."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.checkpoint import save as checkpoint_save
from gsa_train.checkpoint.finite import not_finite
from gsa_train.checkpoint.load import load_checkpoint, sharded_state, sharding_metadata
from gsa_train.checkpoint.optimizer_state import boxes, saved_state, wanted_state
from gsa_train.config import Config
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import MAIN_WEIGHT
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.optimizer.norms import inner_optimizers
from gsa_train.planning.memory.estimate import checkpoint_bytes
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model


def config_of(distributed: bool, precision: str) -> Config:
    parallel = {"distributed_optimizer": distributed}
    train = {"precision": precision, "weight_average_decay": 0.5}
    return tiny_config([SPARSE], parallel=parallel, train=train)


State = dict[str, dict[str, torch.Tensor]]


def state_by_name(model: Model, phase_optimizer: PhaseOptimizer) -> State:
    """Map each parameter to its flat fp32 weight, moments and step count."""
    (inner,) = inner_optimizers(phase_optimizer.optimizer)
    found = {}
    for name, parameter in model.gpt.named_parameters():
        if phase_optimizer.ddps[0].ddp_config.use_distributed_optimizer:
            group, order = inner.model_param_group_index_map[parameter]
            main = inner.optimizer.param_groups[group]["params"][order]
        else:
            main = getattr(parameter, "main_param", parameter)
        tensors: dict[str, Any] = {"weight": main, **inner.optimizer.state[main]}
        found[name] = {key: tensor.detach().flatten().clone() for key, tensor in tensors.items()}
    return found


def write_trained(config: Config, steps: int, folder: Path) -> tuple[Path, State]:
    """Write a checkpoint after some steps, and return its state by name."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for seed in range(steps):
        take_step(model, optimizer, random_batches(config, seed), config, lr=1e-2)
    checkpoint = write_checkpoint(folder, steps, model, optimizer, config)
    state = state_by_name(model, optimizer)
    close_optimizer(model, optimizer)
    return checkpoint, state


KINDS = [(distributed, precision) for distributed in (True, False) for precision in ("fp32", "bf16")]


def assert_arrives(folder: Path, steps: int, before: State, config: Config) -> None:
    """Check weights, moments and step count in a new model and optimizer that can continue."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    load_checkpoint(folder, model, optimizer, single_rank(), with_optimizer=True)
    after = state_by_name(model, optimizer)
    assert after.keys() == before.keys()
    for name, parameter in model.gpt.named_parameters():
        tensors = after[name]
        assert tensors["step"].item() == steps
        for key in before[name].keys() - {"step"}:
            assert tensors[key].dtype == torch.float32
            assert tensors[key].any(), (name, key)
            assert torch.equal(tensors[key], before[name][key]), (name, key)
        weight = parameter.detach().flatten()
        assert torch.equal(weight, before[name]["weight"].to(weight.dtype)), name
    states = inner_optimizers(optimizer.optimizer)[0].optimizer.state.values()
    counts = [state["step"].data_ptr() for state in states]
    assert len(set(counts)) == len(counts)  # a shared count would rise once per parameter
    result = take_step(model, optimizer, random_batches(config, 9), config, lr=1e-2)
    assert result.grad_norm.isfinite()
    close_optimizer(model, optimizer)


@pytest.mark.parametrize(("distributed", "precision"), KINDS)
def test_weights_moments_and_step_count_arrive(distributed: bool, precision: str, tmp_path: Path) -> None:
    folder, before = write_trained(config_of(distributed, precision), 3, tmp_path)
    for kind in KINDS:
        assert_arrives(folder, 3, before, config_of(*kind))


# --- each rank its own part ----------------------------------------------------------------------------------


def test_a_stretch_of_a_tensor_is_a_few_boxes() -> None:
    draw = random.Random(1)
    for shape in [(), (7,), (5, 8), (3, 1, 4), (2, 3, 4), (1, 6), (6, 1)]:
        elements = torch.arange(math.prod(shape)).view(shape)
        for _ in range(40):
            start, end = sorted(draw.randrange(elements.numel() + 1) for _ in range(2))
            found = []
            for offset, size in boxes(shape, start, end):
                box = elements[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]
                assert tuple(box.shape) == size
                assert all(size) or not size
                found.append(box.flatten())
            expected = torch.arange(start, end)
            assert torch.equal(torch.cat([torch.arange(0), *found]), expected), (shape, start, end)
            assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("kind", [*KINDS, "deepspeed"], ids=str)
def test_a_save_and_a_load_name_the_optimizer_s_own_tensors(kind: tuple[bool, str] | str) -> None:
    """Tensors are not copied or gathered, so no rank holds more than its part."""
    zero = {"parallel": {"strategy": "deepspeed"}, "train": {"precision": "bf16"}}
    config = tiny_config([SPARSE], **zero) if kind == "deepspeed" else config_of(*kind)
    model = tiny_model(config)
    weights = sum(parameter.nbytes for parameter in model.gpt.parameters())
    optimizer = build_optimizer(model, SPARSE, config)
    state = sharded_state(model, None, sharding_metadata(single_rank()))
    own = {tensor.data_ptr(): tensor for part in optimizer.state_parts() for tensor in part.tensors.values()}
    boxes_of_a_save = saved_state(optimizer, dict(state))
    saved = {box.key: box for box in boxes_of_a_save.values()}
    boxes_of_a_load = wanted_state(optimizer, dict(state), saved, moments=True)
    for found in (boxes_of_a_save, boxes_of_a_load):
        assert own.keys() <= {box.data.data_ptr() for box in found.values()}
        inside = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        assert {box.data.untyped_storage().data_ptr() for box in found.values()} <= inside
        assert sum(box.data.nbytes for box in found.values()) == sum(each.nbytes for each in own.values())
    assert weights + sum(each.nbytes for each in own.values()) == checkpoint_bytes(config, SPARSE)
    close_optimizer(model, optimizer)


def test_a_nan_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN must not be reported as a misplaced state."""
    monkeypatch.setattr(checkpoint_save, "not_finite", lambda *_: None)
    config = config_of(True, "bf16")
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    part = next(part for part in optimizer.state_parts() if part.parameter.ndim == 2)
    part.parameter.data.view(-1)[part.start] = part.tensors[MAIN_WEIGHT][0] = math.nan
    folder = write_checkpoint(tmp_path, 1, model, optimizer, config)
    load_checkpoint(folder, model, optimizer, single_rank(), with_optimizer=True)
    assert "fp32 weight of" in str(not_finite(model, optimizer, single_rank()))
    close_optimizer(model, optimizer)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_learning_rates_and_betas_are_the_new_config_s(distributed: bool, tmp_path: Path) -> None:
    """The config's rates count even if the checkpoint's parameter groups differ: gates have their own learning rate."""
    config = config_of(distributed, "fp32")
    folder, before = write_trained(config, 2, tmp_path)

    adam = {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6}
    for multipliers in ({}, {"indexer_lr_mult": 4.0, "gate_lr_mult": 2.0}):
        phase = dataclasses.replace(SPARSE, **multipliers)
        other = dataclasses.replace(config, phases=[phase], train=dataclasses.replace(config.train, **adam))
        resumed_model = tiny_model(other)
        resumed = build_optimizer(resumed_model, phase, other)
        load_checkpoint(folder, resumed_model, resumed, single_rank(), with_optimizer=True)
        after = state_by_name(resumed_model, resumed)
        for name, tensors in before.items():
            for key, tensor in tensors.items():
                assert torch.equal(after[name][key], tensor), (name, key)
        resumed.set_learning_rate(1.0, 0.1)
        (inner,) = inner_optimizers(resumed.optimizer)
        found = {(group["lr"], group["betas"], group["eps"]) for group in inner.optimizer.param_groups}
        rates = {1.0, phase.gate_lr_mult, phase.indexer_lr_mult}
        assert found == {(rate, (0.8, 0.99), 1e-6) for rate in rates}
        close_optimizer(resumed_model, resumed)
