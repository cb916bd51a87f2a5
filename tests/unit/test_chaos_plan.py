"""Tests that the plan of `make chaos` is the same for the same seed."""

from collections import Counter

import pytest
from chaos import COUNTS, RANKS, SAVE_EVERY_STEPS, draw_plan


def test_every_fault_has_a_step_of_its_own_and_a_seed_fixes_all() -> None:
    plan = draw_plan(COUNTS, seed=1, steps=320)
    assert Counter(each.kind for each in plan) == COUNTS
    assert len(plan) >= 25
    steps = [each.step for each in plan]
    assert steps == sorted(set(steps))
    assert steps[0] > 2 * SAVE_EVERY_STEPS
    assert steps[-1] < 320 - SAVE_EVERY_STEPS
    assert {each.rank for each in plan} == set(range(RANKS))
    assert plan == draw_plan(COUNTS, seed=1, steps=320)
    assert plan != draw_plan(COUNTS, seed=2, steps=320)


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(AssertionError, match="20 steps have no room for 28 faults"):
        draw_plan(COUNTS, seed=1, steps=20)
