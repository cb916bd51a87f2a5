"""The rules that call a step a spike: on made-up histories, and on the trace of a real run without faults."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gsa_train.config import MonitorConfig
from gsa_train.spikes import Row, SpikeDetector, replay

ROBUST = MonitorConfig()
OLMO = MonitorConfig(detector="sigma")
"""SkipStepOptimizer of OLMo-core with its defaults."""
RULES = {"robust": ROBUST, "sigma": OLMO}
CLEAN = Path(__file__).parent / "clean_trace.npy"
"""fp32 [steps, (loss, gradient norm)]: `demo.yaml` at 128 tokens, from the first step of its sparse phase on."""


def clean_trace() -> torch.Tensor:
    return torch.from_numpy(np.load(CLEAN))


def noise(steps: int, seed: int = 0, trend: float = 0.0) -> torch.Tensor:
    """A loss about 4 with deviation 0.03 and a gradient norm about 0.5, both without correlation, [steps, 2]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(steps, 2, generator=generator)
    loss = 4 + 0.03 * drawn[:, 0] + trend * torch.arange(steps)
    return torch.stack([loss, 0.5 * (0.1 * drawn[:, 1]).exp()], dim=1)


def flagged(trace: torch.Tensor, config: MonitorConfig) -> list[int]:
    return [step for step, row in enumerate(replay(trace, config)) if row.flagged]


# --- the rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trend", [0.0, -0.01, 0.0005])
def test_noise_about_a_level_or_a_trend_is_no_spike(trend: float) -> None:
    assert not flagged(noise(1200, trend=trend), ROBUST)


@pytest.mark.parametrize("signal", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_spike_is_flagged_from_its_first_step_to_its_last(signal: int, length: int) -> None:
    trace = noise(300)
    trace[200 : 200 + length, signal] *= 5
    assert flagged(trace, ROBUST) == list(range(200, 200 + length))


def test_a_small_rise_is_a_spike_once_it_has_lasted() -> None:
    """0.15 nats: below the least rise of a single step."""
    trace = noise(300)
    trace[200:210, 0] = 4.15
    assert flagged(trace, ROBUST) == list(range(200 + ROBUST.lasting_steps - 1, 210))
    assert not flagged(trace, dataclasses.replace(ROBUST, lasting_steps=11))


def test_least_rises_hold_however_quiet_the_run_was() -> None:
    trace = torch.tensor([[4.0, 0.5]]).repeat(200, 1)
    trace[150, 0] = 4.19
    trace[170, 1] = 1.45
    assert not flagged(trace, ROBUST)
    trace[150, 0], trace[170, 1] = 4.21, 1.55
    assert flagged(trace, ROBUST) == [150, 170]


def test_nothing_is_judged_before_there_is_enough_history() -> None:
    trace = noise(100)
    trace[ROBUST.min_history_steps - 1] *= 9
    assert not flagged(trace, ROBUST)
    trace[ROBUST.min_history_steps] *= 9
    assert flagged(trace, ROBUST) == [ROBUST.min_history_steps]


def test_a_new_level_is_a_spike_for_half_a_window_only() -> None:
    trace = noise(600)
    trace[200:, 0] += 2
    found = flagged(trace, ROBUST)
    assert found == list(range(200, found[-1] + 1))
    assert len(found) <= ROBUST.window_steps // 2 + 1


def test_a_second_spike_hides_behind_the_first_from_the_sigma_rule_only() -> None:
    trace = noise(300)
    trace[150:155, 0] += 4
    trace[200, 0] += 1
    assert 200 in flagged(trace, ROBUST)
    assert 200 not in flagged(trace, OLMO)


def test_the_sigma_rule_is_that_of_olmo_core() -> None:
    trace = noise(200).double()
    trace[150, 0] += 0.3
    rows = replay(trace.float(), OLMO)
    for step in (64, 100, 150, 151, 199):
        seen = trace[max(0, step - 128) : step]
        limits = seen.mean(0) + 6 * seen.std(0)
        assert rows[step].loss_limit == pytest.approx(limits[0].item(), rel=1e-5)
        assert rows[step].grad_norm_limit == pytest.approx(limits[1].item(), rel=1e-5)
        assert rows[step].loss_spikes == (trace[step, 0] > limits[0])
    assert [step for step, row in enumerate(rows) if row.flagged] == [150]


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("signal", [0, 1])
def test_what_is_not_finite_is_never_applied_and_never_history(
    config: MonitorConfig, bad: float, signal: int
) -> None:
    trace = noise(200)
    trace[0, signal] = trace[100, signal] = bad
    rows = replay(trace, config)
    assert [step for step, row in enumerate(rows) if not row.finite] == [0, 100]
    assert [step for step, row in enumerate(rows) if not row.applied] == [0, 100]
    assert all(math.isfinite(row.loss_limit) and math.isfinite(row.grad_norm_limit) for row in rows[65:])
    assert rows[100].strongest()[0] == ("loss", "grad_norm")[signal]


def test_only_log_applies_a_spike() -> None:
    trace = noise(200)
    trace[150] *= 4
    for action in ("log", "skip", "lower_lr", "rewind", "stop"):
        rows = replay(trace, dataclasses.replace(ROBUST, action=action))
        assert [step for step, row in enumerate(rows) if not row.applied] == (
            [] if action == "log" else [150]
        )


# --- going on from a checkpoint -----------------------------------------------------------------------------


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
@pytest.mark.parametrize("at", [10, 151, 160])
def test_a_loaded_detector_judges_to_the_last_bit_as_the_saved_one(config: MonitorConfig, at: int) -> None:
    trace = noise(300)
    trace[150:153, 0] += 0.15
    trace[200] = math.nan
    expected = replay(trace, config)
    first, second = (SpikeDetector(config, torch.device("cpu")) for _ in range(2))
    for loss, norm in trace[:at]:
        first.judge(loss, norm)
    second.load(first.state())
    rows = [second.row(second.judge(loss, norm).row.tolist()) for loss, norm in trace[at:]]
    assert str(rows) == str(expected[at:])  # as text: NaN is not equal to itself


def test_another_window_or_rule_goes_on_with_what_was_saved() -> None:
    trace = noise(300)
    trace[200] *= 5
    for saved, loaded in (
        ({}, {"window_steps": 64}),
        ({"window_steps": 64}, {}),
        ({}, {"detector": "sigma"}),
    ):
        first = SpikeDetector(dataclasses.replace(ROBUST, **saved), torch.device("cpu"))
        second = SpikeDetector(dataclasses.replace(ROBUST, **loaded), torch.device("cpu"))
        for loss, norm in trace[:190]:
            first.judge(loss, norm)
        second.load(first.state())
        rows = [second.row(second.judge(loss, norm).row.tolist()) for loss, norm in trace[190:]]
        assert [190 + step for step, row in enumerate(rows) if row.flagged] == [200]


# --- against OLMo-core's rule -------------------------------------------------------------------------------


def test_a_clean_run_raises_no_alarm() -> None:
    trace = clean_trace()
    assert len(trace) > 1700
    assert not flagged(trace, ROBUST)
    assert flagged(trace, OLMO)


FAULTS = {
    f"{what}, {length} steps": (loss, norm, length)
    for what, loss, norm in (("loss +1", 1.0, 1.0), ("loss +2, norm x3", 2.0, 3.0), ("norm x5", 0.0, 5.0))
    for length in (1, 3, 20)
}
CREEPING = "loss creeps, 60 steps"
FAULTS[CREEPING] = (0.05, 1.0, 60)
"""What happens -> rise of the loss in nats, factor on the gradient norm, steps."""


def delay(detector: SpikeDetector, fault: torch.Tensor) -> float:
    """Steps from the fault's first one to its first flag; infinite if none of its steps is flagged."""
    rows: list[Row] = [detector.row(detector.judge(loss, norm).row.tolist()) for loss, norm in fault]
    return next((late for late, row in enumerate(rows) if row.flagged), math.inf)


def test_faults_in_the_clean_trace_are_found_sooner_and_more_often() -> None:
    """Seen with -s. A fault is added to the clean trace at 12 places; last, a loss that creeps up by 0.05 a step."""
    trace, places = clean_trace(), range(170, 1700, 130)
    found: dict[str, dict[str, list[float]]] = {fault: {rule: [] for rule in RULES} for fault in FAULTS}
    for rule, config in RULES.items():
        for first in places:
            detector = SpikeDetector(config, trace.device)
            for loss, norm in trace[first - config.window_steps : first]:
                detector.judge(loss, norm)
            state = detector.state()
            for fault, (rise, factor, length) in FAULTS.items():
                changed = trace[first : first + length].clone()
                changed[:, 0] += rise * torch.arange(1, length + 1) if fault == CREEPING else rise
                changed[:, 1] *= factor
                detector.load(state)
                found[fault][rule].append(delay(detector, changed))
    print(f"\n{'fault':<26}" + "".join(f"{rule:>10} found, delay" for rule in RULES))
    for fault, by_rule in found.items():
        seen = {rule: [late for late in lates if math.isfinite(late)] for rule, lates in by_rule.items()}
        cells = [
            f"{len(of_rule):>14}/{len(places)} {sum(of_rule) / max(1, len(of_rule)):>7.1f}"
            for of_rule in seen.values()
        ]
        print(f"{fault:<26}" + "".join(cells))
        assert len(seen["robust"]) >= len(seen["sigma"])
    alarms = {rule: len(flagged(trace, config)) for rule, config in RULES.items()}
    print(f"{f'false alarms in {len(trace)}':<26}" + "".join(f"{count:>24}" for count in alarms.values()))
    assert alarms["robust"] < alarms["sigma"]
    late = {
        rule: sum(min(late, FAULTS[fault][2]) for fault in FAULTS for late in found[fault][rule])
        for rule in RULES
    }
    assert late["robust"] < late["sigma"]
