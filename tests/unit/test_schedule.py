"""Tests learning rates at the corners of the schedules."""

import dataclasses
import math

import pytest

from gsa_train.config import PhaseConfig
from gsa_train.phases import learning_rate

PHASE = PhaseConfig(steps=11, lr=1e-3, min_lr=1e-4, warmup_steps=4)


def rates(phase: PhaseConfig, *steps: int) -> list[float]:
    return [learning_rate(phase, step) for step in range(*steps)]


def test_a_linear_warm_up_and_a_half_cosine_down_to_the_minimum() -> None:
    rising = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3]
    falling = [1e-4 + 9e-4 * math.cos(math.pi * step / 12) ** 2 for step in range(7)]
    assert rates(PHASE, 11) == pytest.approx([*rising, *falling])
    assert learning_rate(PHASE, 50) == 1e-4


def test_phases_without_warm_up_of_one_step_and_of_nothing_but_warm_up_are_defined() -> None:
    assert rates(PhaseConfig(steps=3, lr=1e-3, min_lr=0.0), 3) == pytest.approx([1e-3, 0.5e-3, 0.0])
    assert rates(PhaseConfig(steps=1, lr=1e-3, min_lr=1e-4), 1) == [1e-3]
    assert learning_rate(PhaseConfig(steps=2, lr=1e-3, warmup_steps=2), 1) == 1e-3


@pytest.mark.parametrize("steps", [2, 3, 11])
def test_the_last_step_has_the_minimum_whatever_the_warm_up_leaves_of_the_phase(steps: int) -> None:
    for warmup_steps in range(steps):
        phase = PhaseConfig(steps=steps, lr=1e-3, min_lr=1e-4, warmup_steps=warmup_steps)
        assert learning_rate(phase, steps - 1) == 1e-4


@pytest.mark.parametrize(
    ("shape", "height"),
    [
        ("linear", lambda share: 1 - share),
        ("1-sqrt", lambda share: 1 - share**0.5),
        ("cosine", lambda share: math.cos(math.pi * share / 2) ** 2),
    ],
)
def test_wsd_stays_at_the_peak_and_falls_over_its_last_steps(shape, height) -> None:
    phase = dataclasses.replace(PHASE, decay="wsd", decay_steps=4, decay_shape=shape)
    assert rates(phase, 3, 7) == [1e-3] * 4
    falling = rates(phase, 7, 11)
    assert falling == pytest.approx([1e-4 + 9e-4 * height(step / 4) for step in (1, 2, 3, 4)])
    assert rates(dataclasses.replace(phase, steps=4, warmup_steps=0), 4) == falling, "a cool-down"


def test_constant_linear_and_inverse_square_root_follow_their_formulas() -> None:
    assert {*rates(dataclasses.replace(PHASE, decay="constant"), 3, 11)} == {1e-3}
    linear = [1e-3 - 9e-4 * step / 6 for step in range(7)]
    assert rates(dataclasses.replace(PHASE, decay="linear"), 4, 11) == pytest.approx(linear)
    found = rates(dataclasses.replace(PHASE, decay="inverse_sqrt", min_lr=7e-4), 3, 11)
    assert found == pytest.approx([max(7e-4, 1e-3 * (4 / step) ** 0.5) for step in range(4, 12)])
    assert (found[0], found[-1]) == (1e-3, 7e-4)
