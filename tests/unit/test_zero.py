"""Tests steps of DeepSpeed's ZeRO in one process. The steps must equal the steps of megatron-core, and a skipped step
must change nothing. After training, a plain model must remain. tests/distributed/test_many_layouts.py tests several
ranks."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from gsa_train.config import Config, PhaseConfig
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer import zero
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.step import evaluation_step
from gsa_train.validation.requests import Request
from gsa_train.validation.tasks import log_likelihoods
from helpers.single_rank import (
    EOS,
    SPARSE,
    WARM_UP,
    LeavesOut,
    named_weights,
    random_batches,
    random_blocks,
    read_stats,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)
from helpers.zero_of_a_large_model import leave_out_what_nobody_reads, settings_of_a_large_model

# Gates and indexer have other rates, with clipping and weight decay, so that each parameter group counts.
PHASES = [WARM_UP, dataclasses.replace(SPARSE, indexer_lr_mult=3.0, gate_lr_mult=2.0)]
TRAIN = {"grad_clip": 0.5, "weight_decay": 0.1, "micro_batch_size": 1, "global_batch_size": 2}
GSA = {"k_base": 16, "k_min": 16, "k_max": 16, "indexer_temperature": "learned"}
"""All keys are selected."""


def config_of(stage: int | None, offload: bool = False, recompute: str = "none") -> Config:
    zero = {"strategy": "deepspeed", "zero_stage": stage, "offload_optimizer": offload}
    parallel: dict[str, Any] = {} if stage is None else zero
    train = {**TRAIN, "precision": "bf16", "recompute": recompute}
    return tiny_config(PHASES, gsa=GSA, train=train, parallel=parallel)


@pytest.fixture(autouse=True)
def cuts_small_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "_settings", settings_of_a_large_model)
    leave_out_what_nobody_reads(monkeypatch.setattr)


def train(config: Config, steps: int = 2) -> tuple[list[tuple[float, ...]], Model]:
    """Return loss, gradient norm, update norm and validation of each step of both phases, and the final model."""
    model, records = tiny_model(config), []
    for number, phase in enumerate(PHASES):
        optimizer = build_optimizer(model, phase, config)
        for step in range(number * steps, (number + 1) * steps):
            result = take_step(model, optimizer, random_batches(config, step), config, lr=3e-3, step=step)
            changed = optimizer.update_norm(result.verdict.applied)
            loss = result.loss_sum / result.loss_tokens
            validation, _ = evaluation_step(model, random_batches(config, 100), config, single_rank())
            records.append((loss.item(), result.grad_norm.item(), changed.item(), validation.item()))
        close_optimizer(model, optimizer)
    return records, model


def test_it_trains_as_megatron_does_and_leaves_a_plain_model() -> None:
    expected, reference = train(config_of(None))
    assert max(norm for _, norm, *_ in expected) > TRAIN["grad_clip"]  # clipping acts
    plain = {(name, type(value)) for each in reference.gpt.modules() for name, value in each.__dict__.items()}
    without = [(1, False, "none"), (2, False, "none"), (2, True, "none")]
    # Parts of the attention's forward pass run in the backward pass, where DeepSpeed gathers only what it expects.
    for stage, offload, recompute in (
        *without,
        (3, True, "none"),
        (3, False, "selective"),
        (3, True, "full"),
    ):
        found, model = train(config_of(stage, offload, recompute))
        for step, (record, other) in enumerate(zip(found, expected, strict=True)):
            assert record == pytest.approx(other, rel=1e-6), (stage, offload, recompute, step)
        weights = named_weights(reference)
        for name, weight in named_weights(model).items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7, msg=name)
        left = {(name, type(value)) for each in model.gpt.modules() for name, value in each.__dict__.items()}
        assert left | {("current_microbatch", int)} == plain  # the schedule's
        for parameter, other in zip(model.gpt.parameters(), reference.gpt.parameters(), strict=True):
            assert vars(parameter).keys() == vars(other).keys()


def numbers_of(
    action: str, model: Model, optimizer: PhaseOptimizer, config: Config, seed: int
) -> list[float]:
    batches, blocks = random_batches(config, seed), random_blocks(config, seed)
    if "step" in action:
        result = take_step(model, optimizer, batches, config, 3e-3, seed, measures="measured" in action)
        found = [result.loss_sum.item(), result.grad_norm.item()]
    elif "validation" in action:
        loss_sum, _ = evaluation_step(model, batches, config, single_rank(), measures="measured" in action)
        found = [loss_sum.item()]
    else:
        requests = [Request(row[row != EOS][:8], 3) for row in blocks.numpy()]
        found = log_likelihoods(model, requests, EOS, config, single_rank())
    measured = [value for name, row in sorted(read_stats(model).items()) for value in row]
    model.runtime.stats.reset()
    return found + measured


ACTIONS = (
    *("tasks", "step", "step", "measured step", "validation", "step", "measured validation"),
    *("measured step", "tasks", "step"),
)
BASE = dataclasses.replace(SPARSE, train="base")


NIGHTLY = [pytest.param(each, marks=pytest.mark.nightly) for each in (BASE, WARM_UP)]


@pytest.mark.parametrize("phase", [*NIGHTLY, SPARSE], ids=["sparse base", "warm-up", "sparse"])
def test_passes_of_every_kind_take_turns(phase: PhaseConfig) -> None:
    """DeepSpeed records the order in which a pass uses weights. It stops if a later pass uses others."""
    series, outside = [], set()
    for stage in (None, 3):
        config = config_of(stage)
        gsa = dataclasses.replace(config.gsa, indexer_temperature=1.0)
        config = dataclasses.replace(config, phases=[phase], gsa=gsa)
        model = tiny_model(config)
        optimizer = build_optimizer(model, phase, config)
        series.append(
            [numbers_of(each, model, optimizer, config, seed) for seed, each in enumerate(ACTIONS, start=1)]
        )
        if stage == 3:
            for each in model.gpt.modules():
                read: Any = each
                outside |= {id(parameter) for _, parameter in read.ds_external_parameters()}
            indexers = [attention.indexer for attention in model.attentions]
        close_optimizer(model, optimizer)
    expected, found = series
    for action, numbers, others in zip(ACTIONS, found, expected, strict=True):
        assert numbers == pytest.approx(others, rel=1e-6, nan_ok=True), action
    # Only these weights are announced as read outside of their module. DeepSpeed gathers them in every pass.
    assert outside == {id(bias) for each in indexers for bias in (each.score_bias, each.weight_bias)}


def test_weights_on_their_way_are_waited_for() -> None:
    """A forward pass without a backward pass leaves weights in flight before a checkpoint or the next phase."""
    config = config_of(3)
    model = tiny_model(config)
    optimizer = build_optimizer(model, PHASES[1], config)
    take_step(model, optimizer, random_batches(config, 0), config, lr=3e-3)
    with optimizer.whole_weights(changes=False):
        weights = named_weights(model)

    def validate() -> None:
        evaluation_step(model, random_batches(config, 100), config, single_rank())
        parameters: list[Any] = list(model.gpt.parameters())
        assert ZeroParamStatus.INFLIGHT in {each.ds_status for each in parameters}

    def assert_whole() -> None:
        assert all(torch.equal(weight, weights[name]) for name, weight in named_weights(model).items())

    validate()
    with optimizer.whole_weights(changes=False):
        assert_whole()
    validate()
    close_optimizer(model, optimizer)
    assert_whole()


AT_NIGHT = [pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, False), (2, False), (3, True))]


@pytest.mark.parametrize(("stage", "offload"), [(2, True), (3, False), *AT_NIGHT])
def test_a_step_that_is_left_out_changes_nothing(stage: int, offload: bool) -> None:
    """The second step is a spike, and the third has non-finite gradients. Neither has an effect."""
    after = []
    for left_out in (False, True):
        config = config_of(stage, offload)
        model = tiny_model(config)
        optimizer = build_optimizer(model, PHASES[1], config)
        take_step(model, optimizer, random_batches(config, 0), config, lr=3e-3)
        if left_out:
            with optimizer.whole_weights(changes=False):
                before = named_weights(model)
            detector = LeavesOut(config.monitor, single_rank().device)
            spike = take_step(model, optimizer, random_batches(config, 1), config, lr=3e-3, detector=detector)
            assert spike.grad_norm > 0
            weight: Any = model.gpt.decoder.final_layernorm.weight
            poison = weight.register_hook(lambda gradient: gradient * torch.nan)
            result = take_step(model, optimizer, random_batches(config, 1), config, lr=3e-3)
            poison.remove()
            assert not result.grad_norm.isfinite()
            assert optimizer.update_norm(result.verdict.applied) == 0
            with optimizer.whole_weights(changes=False):
                assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model).items())
        result = take_step(model, optimizer, random_batches(config, 2), config, lr=3e-3)
        norms = (result.grad_norm, optimizer.update_norm(result.verdict.applied))
        held = [weakref.ref(each) for each in (optimizer._engine, optimizer._zero, optimizer._flat[0])]
        close_optimizer(model, optimizer)
        after.append((norms, named_weights(model)))
        del optimizer
        gc.collect()
        assert [each() for each in held] == [None, None, None]  # none of it keeps taking memory
    (norms, weights), (other_norms, other_weights) = after
    assert norms == other_norms
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
