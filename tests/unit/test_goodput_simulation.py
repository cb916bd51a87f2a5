"""Compares simulated runs with counts by hand for a few seconds, and with formulas for many."""

import dataclasses
import math

import pytest

from gsa_train.planning.goodput.simulate import (
    Life,
    Outcome,
    Parts,
    daly_seconds,
    first_order_ettr,
    simulate,
    try_interval,
    try_intervals,
    young_seconds,
)

RESTART = {"start_up_seconds": 10.0, "detection_seconds": 3.0, "down_seconds": 4.0}
PARTS = Parts(step_seconds=1.0, stall_seconds=2.0, durable_seconds=5.0, **RESTART)
FOR_EVER = Life(math.inf)


def parts_of(found: Outcome) -> dict[str, float]:
    seconds = dataclasses.asdict(found)
    faults, wall = seconds.pop("faults"), seconds.pop("wall")
    assert sum(seconds.values()) == pytest.approx(wall)
    return {name: value for name, value in {**seconds, "faults": faults}.items() if value}


def test_a_run_without_faults_pays_for_its_start_and_its_saves() -> None:
    """The start-up takes 10 s. Then 20 s of steps and 2 s of stall repeat. The third save has just begun."""
    found = simulate(PARTS, 20, [FOR_EVER], wall_seconds=10 + 3 * 20 + 2 * 2 + 1)
    assert parts_of(found) == {"productive": 60, "start_up": 10, "stalls": 5}


@pytest.mark.parametrize(
    ("seconds", "kept", "worked", "stalls"),
    [
        (10 + 20 + 4, 0, 22, 2),  # the save is not durable yet
        (10 + 20 + 5, 20, 23, 2),
        (10 + 20 + 2 + 20 + 1, 20, 40, 3),  # in the second stall
        (8, 0, 0, 0),  # in its start-up
    ],
)
def test_a_fault_costs_what_no_durable_checkpoint_has(seconds, kept, worked, stalls):
    found = simulate(PARTS, 20, [Life(seconds), FOR_EVER], wall_seconds=seconds + 7 + 10)
    expected = {
        "productive": kept, "repeated": worked - kept, "stalls": stalls, "start_up": min(seconds, 10) + 10,
    }  # fmt: skip
    expected |= {"detection": 3, "down": 4, "faults": 1}
    assert parts_of(found) == {name: value for name, value in expected.items() if value}


def test_a_save_waits_for_the_one_before() -> None:
    slow = dataclasses.replace(PARTS, durable_seconds=30.0)
    found = simulate(slow, 20, [FOR_EVER], wall_seconds=10 + 20 + 30 + 30)
    assert parts_of(found) == {"start_up": 10, "productive": 20 + 20 + 20, "stalls": 20}


def test_a_stop_saves_and_what_is_beside_the_steps_has_its_share() -> None:
    beside = dataclasses.replace(PARTS, extra_share=0.25)
    lives = [Life(40, saves_at_end=True), FOR_EVER._replace(start_up_seconds=8.0)]
    found = simulate(beside, 1000, lives, wall_seconds=40 + 4 + 8)
    expected = {"start_up": 18, "productive": 20, "extra": 5, "stalls": 5}
    assert parts_of(found) == {**expected, "down": 4}
    lives[0] = lives[0]._replace(down_seconds=0.0)  # a pause of the user's
    assert parts_of(simulate(beside, 1000, lives, wall_seconds=40 + 8)) == expected


def test_a_run_that_its_lives_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="before the run's 100 s"):
        simulate(PARTS, 20, [Life(50)], wall_seconds=100)


def test_the_simulation_is_the_formula_where_saves_and_intervals_are_short() -> None:
    """The ETTR is about 1 - C / T - (T / 2 + restart) / M for stalls of C, saves every T and faults every M seconds."""
    mean, interval = 40_000.0, 1000
    parts = dataclasses.replace(PARTS, durable_seconds=2.0)
    tried = try_interval(parts, interval, mean, days=60, trials=40, seed=1)
    expected = first_order_ettr(parts, interval, mean)
    assert tried.error < 0.001
    assert abs(tried.ettr - expected) < 4 * tried.error + 0.001
    assert tried.share("stalls") == pytest.approx(2 / 1002, rel=0.05)
    assert tried.share("repeated") == pytest.approx(interval / 2 / mean, rel=0.2)


def test_the_best_interval_is_youngs_where_that_is_exact() -> None:
    """The optimum is flat: twice the interval costs a quarter more."""
    mean = 20_000.0
    parts = dataclasses.replace(PARTS, stall_seconds=4.0, durable_seconds=4.0)
    young = young_seconds(4.0, mean)
    assert young == 400
    assert daly_seconds(4.0, mean) == pytest.approx(young, rel=0.02)
    assert daly_seconds(300.0, 100.0) == 100.0  # a save that takes longer than the time between faults
    tried = try_intervals(parts, mean, days=30, trials=20, seed=3)
    best = max(tried, key=lambda each: each.ettr)
    assert young / 1.5 < best.interval_steps < young * 1.5
    assert tried[0].ettr < best.ettr > tried[-1].ettr
    assert (tried[0].interval_steps, tried[-1].interval_steps) == (50, 3200)
    # Each save would wait for the previous one.
    hidden = try_intervals(dataclasses.replace(PARTS, durable_seconds=600.0), mean, days=1, trials=2, seed=1)
    assert hidden[len(hidden) // 2].interval_steps == 600


def test_the_same_seed_gives_the_same_faults() -> None:
    tried = (try_interval(PARTS, 100, 10_000, days=5, trials=3, seed=seed) for seed in (1, 1, 2))
    first, again, other = (each.runs for each in tried)
    assert first == again != other
    longer = try_interval(PARTS, 1000, 10_000, days=5, trials=3, seed=1).runs
    assert [each.faults for each in longer] == [each.faults for each in first]
