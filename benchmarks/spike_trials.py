"""Measures the false alarms of a spike rule on a run without faults, and how soon it finds faults put into the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gsa_train.config import MonitorConfig
from gsa_train.reliability.monitor.spikes import SpikeDetector, replay

OLMO = MonitorConfig(detector="sigma", sigmas=6.0, window_steps=128, min_history_steps=64)
"""The defaults of SkipStepOptimizer in OLMo-core."""

RUN_UP_STEPS = 42
"""Steps before the window of the first place, because a phase begins with a warm-up of the learning rate."""
STEPS_BETWEEN_PLACES = 130
"""Steps between the places of faults, so that each has its own history."""


@dataclass(frozen=True)
class Fault:
    rise: float
    """Rise of the loss in nats; for a creeping fault, the rise per step."""
    factor: float
    """Factor of the gradient norm."""
    steps: int
    creeps: bool = False
    begins_with_norm: bool = False
    """Whether one large gradient comes first, after which the loss rises."""

    def put_into(self, trace: torch.Tensor) -> torch.Tensor:
        """Return the first `steps` rows of a trace [n, (loss, gradient norm)] with this fault."""
        changed = trace[: self.steps].clone()
        changed[int(self.begins_with_norm) :, 0] += self.rise
        if self.creeps:
            changed[:, 0] += self.rise * torch.arange(len(changed))
        changed[: 1 if self.begins_with_norm else None, 1] *= self.factor
        return changed


FAULTS = {
    f"{what}, {steps} steps": Fault(rise, factor, steps)
    for what, rise, factor in (("loss +1", 1.0, 1.0), ("loss +2, norm x3", 2.0, 3.0), ("norm x5", 0.0, 5.0))
    for steps in (1, 3, 20)
}
FAULTS["norm x20, 1 steps"] = Fault(0.0, 20.0, 1)
FAULTS["norm x5 once, then loss +2, 20 steps"] = Fault(2.0, 5.0, 20, begins_with_norm=True)
FAULTS["loss creeps by 0.05, 60 steps"] = Fault(0.05, 1.0, 60, creeps=True)


@dataclass(frozen=True)
class Trial:
    false_alarms: list[int]
    """Flagged steps of the unchanged trace, from 0."""
    delays: dict[str, list[float]]
    """Maps a fault to its delay at each place: steps from its first step to the first flagged one, or infinity."""

    def found(self, fault: str) -> list[float]:
        return [delay for delay in self.delays[fault] if math.isfinite(delay)]

    def steps_lost(self) -> float:
        """Return the sum of all delays; a fault that is not found counts with its length."""
        return sum(
            min(delay, FAULTS[fault].steps) for fault, delays in self.delays.items() for delay in delays
        )


@torch.inference_mode()
def try_rule(
    trace: torch.Tensor, config: MonitorConfig, grad_clip: float, faults: Mapping[str, Fault] = FAULTS
) -> Trial:
    """Replay a trace fp32 [steps, (loss, gradient norm)] without faults and with one fault at a time."""
    delays: dict[str, list[float]] = {name: [] for name in faults}
    longest = max((fault.steps for fault in faults.values()), default=0)
    places = range(config.window_steps + RUN_UP_STEPS, len(trace) - longest, STEPS_BETWEEN_PLACES)
    for first in places if faults else ():
        detector = SpikeDetector(config, trace.device)
        for loss, norm in trace[first - config.window_steps : first]:
            detector.judge(loss, norm, grad_clip)
        state = detector.state()
        for name, fault in faults.items():
            detector.load(state)
            delays[name].append(_delay(detector, fault.put_into(trace[first:]), grad_clip))
    alarms = [step for step, row in enumerate(replay(trace, config, grad_clip)) if row.flagged]
    return Trial(alarms, delays)


def _delay(detector: SpikeDetector, fault: torch.Tensor, grad_clip: float) -> float:
    for late, (loss, norm) in enumerate(fault):
        if detector.row(detector.judge(loss, norm, grad_clip).row.tolist()).flagged:
            return late
    return math.inf


def table(trials: Mapping[str, Trial]) -> str:
    """Format a table with one column per detection rule.

    The first row counts false alarms. The row of a fault shows how often a rule finds the fault, and after
    how many steps on average. The last row adds up the steps over all faults.
    """
    lines = [f"{'':<38}" + "".join(f"{rule:>22}" for rule in trials)]
    counts = [f"{len(trial.false_alarms):>22}" for trial in trials.values()]
    lines.append(f"{'false alarms':<38}" + "".join(counts))
    for fault in next(iter(trials.values())).delays:
        cells = []
        for trial in trials.values():
            found = trial.found(fault)
            after = f"after {statistics.fmean(found):4.1f}" if found else "-- "
            cells.append(f"{len(found):>7}/{len(trial.delays[fault])} {after}".rjust(22))
        lines.append(f"{fault:<38}" + "".join(cells))
    lost = [f"{trial.steps_lost():>22.0f}" for trial in trials.values()]
    lines.append(f"{'steps until found, or missed':<38}" + "".join(lost))
    return "\n".join(lines)
