"""Tests learning rates at the corners of the schedules."""

import dataclasses
import math

import pytest

from gsa_train.config import PhaseConfig
from gsa_train.phases import learning_rate

PHASE = PhaseConfig(steps=11, lr=1e-3, min_lr=1e-4, warmup_steps=4)


def test_warm_up_rises_linearly_from_a_first_step_above_zero_to_the_peak() -> None:
    rates = [learning_rate(PHASE, step) for step in range(4)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


def test_cosine_falls_from_the_peak_at_every_step_as_a_half_cosine_and_ends_at_the_minimum() -> None:
    rates = [learning_rate(PHASE, step) for step in range(4, 11)]
    assert (rates[0], rates[-1], learning_rate(PHASE, 50)) == (1e-3, 1e-4, 1e-4)
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(1e-4 + 9e-4 * math.cos(math.pi * step / 12) ** 2)


def test_constant_stays_at_the_peak_after_the_warm_up() -> None:
    phase = dataclasses.replace(PHASE, decay="constant")
    assert {learning_rate(phase, step) for step in range(3, 11)} == {1e-3}


def test_phases_without_warm_up_of_one_step_and_of_nothing_but_warm_up_are_defined() -> None:
    rates = [learning_rate(PhaseConfig(steps=3, lr=1e-3, min_lr=0.0), step) for step in range(3)]
    assert rates == pytest.approx([1e-3, 0.5e-3, 0.0])
    assert learning_rate(PhaseConfig(steps=1, lr=1e-3, min_lr=1e-4), 0) == 1e-3
    assert learning_rate(PhaseConfig(steps=2, lr=1e-3, warmup_steps=2), 1) == 1e-3


@pytest.mark.parametrize("steps", [2, 3, 11])
def test_the_last_step_has_the_minimum_whatever_the_warm_up_leaves_of_the_phase(steps: int) -> None:
    for warmup_steps in range(steps):
        phase = PhaseConfig(steps=steps, lr=1e-3, min_lr=1e-4, warmup_steps=warmup_steps)
        assert learning_rate(phase, steps - 1) == 1e-4
