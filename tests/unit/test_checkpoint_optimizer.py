"""A checkpoint of the plain or the distributed optimizer, in fp32 or bf16, goes on in any of these."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train import optim
from gsa_train.checkpoint import load_checkpoint
from gsa_train.config import Config
from gsa_train.model.build import Model
from gsa_train.optim import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.optim_repairs import inner_optimizers
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model


def config_of(distributed: bool, precision: str) -> Config:
    parallel, train = {"distributed_optimizer": distributed}, {"precision": precision}
    return tiny_config([SPARSE], parallel=parallel, train=train)


def state_by_name(model: Model, phase_optimizer: PhaseOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter -> fp32 weight, moments and step count, flat."""
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


def write_trained(
    config: Config, steps: int, folder: Path
) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A checkpoint after some steps, and its state by name."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for seed in range(steps):
        take_step(model, optimizer, random_batches(config, seed), config, lr=1e-2)
    checkpoint = write_checkpoint(folder, steps, model, optimizer, config)
    state = state_by_name(model, optimizer)
    close_optimizer(model, optimizer)
    return checkpoint, state


KINDS = [(distributed, precision) for distributed in (True, False) for precision in ("fp32", "bf16")]


def assert_arrives(
    folder: Path, steps: int, before: dict[str, dict[str, torch.Tensor]], config: Config
) -> None:
    """Weights, moments and step count in a new model and optimizer, which can go on."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    load_checkpoint(folder, model, optimizer, single_rank(), with_optimizer=True)
    after = state_by_name(model, optimizer)
    assert after.keys() == before.keys()
    for name, parameter in model.gpt.named_parameters():
        tensors = after[name]
        assert tensors["step"].item() == steps
        for key in ("weight", "exp_avg", "exp_avg_sq"):
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
    """In either optimizer and in either precision, whatever wrote them."""
    folder, before = write_trained(config_of(distributed, precision), 3, tmp_path)
    for kind in KINDS:
        assert_arrives(folder, 3, before, config_of(*kind))


def test_they_arrive_from_several_buckets_of_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large models have them with overlap_grad_reduce: each ends in padding, behind which the next begins."""
    small_buckets = partial(optim.DistributedDataParallelConfig, bucket_size=300)
    monkeypatch.setattr(optim, "DistributedDataParallelConfig", small_buckets)
    config = tiny_config([SPARSE], parallel={"overlap_grad_reduce": True})
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    (buffer,) = optimizer.ddps[0].buffers
    ends = [
        max(end for _, end, number in buffer.param_index_map.values() if number == bucket.bucket_id)
        for bucket in buffer.buckets
    ]
    assert sum(end % 128 > 0 for end in ends[:-1]) > 3
    close_optimizer(model, optimizer)
    folder, before = write_trained(config, 2, tmp_path)
    for other in (config, config_of(False, "fp32")):
        assert_arrives(folder, 2, before, other)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_learning_rates_and_betas_are_the_new_config_s(distributed: bool, tmp_path: Path) -> None:
    """Also where groups of parameters differ from the checkpoint's: gates with a learning rate of their own."""
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
