"""Tests that a step's actions and learning rate follow from its number, its phase and the config."""

import dataclasses
from typing import Any

import pytest

from gsa_train.config import PhaseConfig
from gsa_train.phases import learning_rate, phase_ranges
from gsa_train.plan import plan_step
from gsa_train.services import StepPlan
from helpers.single_rank import SPARSE, WARM_UP, tiny_config

PHASES = [dataclasses.replace(WARM_UP, steps=8), dataclasses.replace(SPARSE, steps=12)]
"""Steps 1 to 8, and 9 to 20."""
EVALUATE = {"every_steps": 6, "tasks": ["./x"], "tasks_every_steps": 9}
CONFIG = tiny_config(PHASES, logging={"every_steps": 5}, evaluate=EVALUATE)
RANGES = phase_ranges(PHASES)


def plan(step: int, skipped: set[int] | None = None, before: int = 0, save_is_due: bool = False) -> StepPlan:
    phase_range = next(each for each in RANGES if each.start < step <= each.end)
    train = dataclasses.replace(CONFIG.train, iterations_to_skip=sorted(skipped or ()))
    config = dataclasses.replace(CONFIG, train=train)
    return plan_step(step, phase_range, config, steps_before_start=before, save_is_due=save_is_due)


@pytest.mark.parametrize(
    ("step", "does"),
    [
        (1, "logs"),  # the first of a phase
        (2, ""),
        (5, "logs"),
        (6, "validates"),
        (8, "logs ends_phase"),
        (9, "logs scores_tasks"),  # the first of the other phase
        (10, "logs"),
        (12, "validates"),
        (18, "validates scores_tasks"),
        (20, "logs ends_phase ends_run"),
    ],
)
def test_what_a_step_does_follows_from_its_number(step: int, does: str) -> None:
    planned = dataclasses.asdict(plan(step))
    flags = ("logs", "validates", "scores_tasks", "saves", "ends_phase", "ends_run")
    assert " ".join(name for name in flags if planned[name]) == does
    assert planned["trains"]
    assert planned["left_out_through"] is None


@pytest.mark.parametrize("step", range(1, 21))
def test_nothing_is_logged_validated_or_saved_before_the_monitor_has_judged_it(step: int) -> None:
    for save_is_due in (False, True):
        planned = plan(step, save_is_due=save_is_due)
        assert planned.saves == save_is_due
        acts = (planned.logs, planned.validates, planned.scores_tasks, planned.saves, planned.ends_phase)
        assert planned.reads_monitor == any(acts)
        assert planned.weights_are_kept == (save_is_due or step == 20)


@pytest.mark.parametrize(
    ("step", "skipped", "before", "through"),
    [
        (3, {3, 4, 5}, 0, 5),  # where a stretch begins
        (4, {3, 4, 5}, 0, None),
        (5, {3, 4, 5}, 0, None),
        (4, {3, 4, 5}, 3, 5),  # where a start begins in it
        (7, {7, 8, 9, 10}, 0, 8),  # a phase ends it
        (9, {7, 8, 9, 10}, 0, 10),  # and the next one begins with the rest
        (7, {5, 7}, 0, 7),
        (20, {20}, 0, 20),
    ],
)
def test_a_stretch_of_left_out_steps_is_named_once_by_each_start_and_phase(step, skipped, before, through):
    planned = plan(step, skipped, before)
    assert not planned.trains
    assert planned.left_out_through == through


@pytest.mark.parametrize("step", [1, 5, 8, 20])
def test_a_step_that_is_left_out_is_not_logged_and_all_else_of_it_is_done(step: int) -> None:
    left_out: dict[str, Any] = dataclasses.asdict(plan(step, {step}, save_is_due=True))
    trained: dict[str, Any] = dataclasses.asdict(plan(step, save_is_due=True))
    different = {name for name in trained if trained[name] != left_out[name]}
    assert different == {"trains", "logs", "left_out_through"}


# --- learning rates at the corners of the schedules --------------------------------------------------------


def rates(phase: PhaseConfig, steps: int) -> list[float]:
    return [learning_rate(phase, step) for step in range(steps)]


def test_phases_without_warm_up_of_one_step_and_of_nothing_but_warm_up_are_defined() -> None:
    assert rates(PhaseConfig(steps=3, lr=1e-3, min_lr=0.0), 3) == pytest.approx([1e-3, 0.5e-3, 0.0])
    assert rates(PhaseConfig(steps=1, lr=1e-3, min_lr=1e-4), 1) == [1e-3]
    assert learning_rate(PhaseConfig(steps=2, lr=1e-3, warmup_steps=2), 1) == 1e-3
    assert learning_rate(PhaseConfig(steps=3, lr=1e-3, min_lr=1e-4, warmup_steps=2), 2) == 1e-4
