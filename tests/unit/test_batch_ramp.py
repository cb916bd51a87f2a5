"""Tests a batch ramp: the size of each step, the text that it reads, learning rates and costs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config, PhaseConfig, TrainConfig
from gsa_train.config.batch_ramp import batch_in_words, batch_size, sequences_before, tokens_of_phases
from gsa_train.config.train import RampStage
from gsa_train.data.batches import TrainBatches
from gsa_train.phases import PhaseRange, in_batches, learning_rate
from gsa_train.planning.dry_run import describe, training_operations
from helpers.single_rank import SPARSE, random_batches, single_rank, step_gradients, tiny_config, tiny_model

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
LENGTH = 16
RAMP = [RampStage(100, 2), RampStage(300, 4)]
TRAIN = TrainConfig(seq_len_tokens=LENGTH, micro_batch_size=2, global_batch_size=8, batch_ramp=RAMP)
SIZES = [2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8]
"""128 tokens after the first stage, because 100 tokens are not a whole number of steps; 320 after the second."""


def test_a_stage_ends_with_the_step_that_reaches_its_tokens() -> None:
    assert [batch_size(TRAIN, step) for step in range(12)] == SIZES
    assert [sequences_before(TRAIN, step) for step in range(13)] == [sum(SIZES[:step]) for step in range(13)]
    passed = dataclasses.replace(TRAIN, batch_ramp=[RampStage(100, 2), RampStage(110, 4)])  # no step has 4
    assert [batch_size(passed, step) for step in range(6)] == [2, 2, 2, 2, 8, 8]
    assert batch_in_words(TRAIN) == "2 up to 100 tokens, 4 up to 300 tokens, then 8"
    assert batch_in_words(TrainConfig()) == "8"


def rates(train: TrainConfig, phase: PhaseConfig, start: int = 0) -> list[float]:
    at = PhaseRange(0, phase, start, start + phase.steps)
    return [learning_rate(*in_batches(train, at, step)) for step in range(at.start, at.end)]


SCHEDULES = [("cosine", 0, ""), ("linear", 0, ""), ("inverse_sqrt", 0, ""), ("constant", 0, "")]
SCHEDULES += [("wsd", 4, "1-sqrt"), ("wsd", 4, "linear"), ("wsd", 4, "cosine")]


@pytest.mark.parametrize(("decay", "decay_steps", "shape"), SCHEDULES)
def test_learning_rates_follow_the_formulas_by_tokens(decay: str, decay_steps: int, shape: str) -> None:
    phase = PhaseConfig("phase", 12, lr=1e-3, min_lr=7e-4, warmup_steps=5, decay=decay)
    phase = dataclasses.replace(phase, decay_steps=decay_steps, decay_shape=shape or "linear")
    without_ramp = dataclasses.replace(TRAIN, batch_ramp=[])
    for train, sizes in ((TRAIN, SIZES), (without_ramp, [8] * 12)):
        found, ends = rates(train, phase), [sum(sizes[: step + 1]) / 8 for step in range(12)]
        warm_up, last = ends[4], ends[-1]
        assert found[:5] == pytest.approx([1e-3 * end / warm_up for end in ends[:5]])
        for end, rate in zip(ends[5:], found[5:], strict=True):
            share = max(0.0, (end - 1 - warm_up) / (last - 1 - warm_up))
            fall = max(0.0, (end - (last - 4)) / 4)
            shapes = {"1-sqrt": math.sqrt(fall), "linear": fall, "cosine": math.sin(math.pi * fall / 2) ** 2}
            expected = {
                "cosine": 7e-4 + 3e-4 * math.cos(math.pi * share / 2) ** 2,
                "linear": 1e-3 - 3e-4 * share,
                "inverse_sqrt": max(7e-4, min(1e-3, 1e-3 * math.sqrt(warm_up / end))),
                "wsd": 1e-3 - 3e-4 * shapes.get(shape, 0.0),
                "constant": 1e-3,
            }
            assert rate == pytest.approx(expected[decay])
    # A ramp of full batches, and a phase after the ramp, have the rates of a run without a ramp, to the last bit.
    plain = rates(without_ramp, phase)
    assert rates(dataclasses.replace(TRAIN, batch_ramp=[RampStage(500, 8)]), phase) == plain
    assert rates(TRAIN, phase, start=7) == plain
    assert rates(TRAIN, phase) != plain
    # A ramp that ends after the phase has them, too.
    assert rates(dataclasses.replace(TRAIN, batch_ramp=[RampStage(10**6, 2)]), phase) == plain


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", range(2, 12))
def test_a_phase_inside_a_ramp_ends_with_its_smallest_rate(decay: str, steps: int) -> None:
    phase = PhaseConfig("phase", steps, lr=1e-3, min_lr=0.0, warmup_steps=1, decay=decay, decay_steps=1)
    assert rates(TRAIN, phase)[-1] == 0.0
    falling = rates(TRAIN, dataclasses.replace(phase, decay="inverse_sqrt"))
    assert falling == sorted(
        set(falling), reverse=True
    )  # also if the last batch has more sequences than the warm-up


def with_ramp(**train: Any) -> Config:
    config = tiny_config(
        [SPARSE], data={"tokenizer": str(SAMPLE / "tokenizer.model"), "train_dir": str(SAMPLE / "train")}
    )
    return dataclasses.replace(config, train=dataclasses.replace(TRAIN, **train))


def test_the_text_is_the_same_stream_cut_by_hand_from_any_step_on() -> None:
    ramped, plain = with_ramp(), with_ramp(batch_ramp=[], global_batch_size=2)
    tokenizer = Tokenizer(ramped.data.tokenizer)
    batches = TrainBatches(plain, single_rank(), tokenizer, None)
    stream = torch.cat([each.tokens for _ in range(22) for each in batches.next_step()])
    batches.close()
    expected = stream.split(SIZES[:10])
    read = TrainBatches(ramped, single_rank(), tokenizer, None)
    for step in range(10):
        if step == 5:  # inside the ramp
            state = read.state()
            read.close()
            assert state["consumed_samples"] == sum(SIZES[:5])
            read = TrainBatches(ramped, single_rank(), tokenizer, state)
        parts = read.next_step(step)
        assert len(parts) == SIZES[step] // 2
        assert torch.equal(torch.cat([each.tokens for each in parts]), expected[step])
    read.close()


def test_a_small_step_has_the_gradients_of_a_run_with_this_batch_size() -> None:
    """The losses of the router are means over the step's tokens, too."""
    moe = {"experts": 4, "top_k": 2, "expert_ffn_hidden_size": 8, "balance_coeff": 0.5, "z_loss_coeff": 0.5}
    small = tiny_config([SPARSE], moe=moe, train={"global_batch_size": 2})
    ramped = tiny_config([SPARSE], moe=moe, train={"batch_ramp": [RampStage(100, 2)]})
    assert ramped.train.global_batch_size == 4
    batches = random_batches(small)
    (one, expected), (two, found) = (
        step_gradients(tiny_model(config), SPARSE, batches, config) for config in (small, ramped)
    )
    assert one.grad_norm == two.grad_norm
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_costs_count_the_tokens_of_each_phase() -> None:
    phases = [dataclasses.replace(SPARSE, steps=steps) for steps in (3, 6)]
    config, full = (
        dataclasses.replace(each, phases=phases) for each in (with_ramp(), with_ramp(batch_ramp=[]))
    )
    assert tokens_of_phases(config) == [6 * LENGTH, 30 * LENGTH]
    assert training_operations(config) / training_operations(full) == pytest.approx(36 / (9 * 8))
    assert "sequences per step: 2 up to 100 tokens, 4 up to 300 tokens, then 8" in describe(config, 1)
