"""Compute learning rates as pure functions, which need no state in checkpoints.

To add a schedule, add a function to SCHEDULES, from which `phases.decay` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gsa_train.config import PhaseConfig

Schedule = Callable[[float, PhaseConfig], float]
"""Maps a step to the learning rate. Step 0 is the first step of the phase. The function is called only for steps after
the learning-rate warm-up. With a batch ramp, the step may be a fraction (`in_batches`, phases.py)."""


def progress(step: float, phase: PhaseConfig) -> float:
    """Return 0 at the first step after the warm-up and 1 at the phase's last step."""
    decay_steps = phase.steps - 1 - phase.warmup_steps
    if decay_steps <= 0:  # after a warm-up to `lr` the only step left has `min_lr`
        return 1.0 if phase.warmup_steps > 0 else 0.0
    return min(max((step - phase.warmup_steps) / decay_steps, 0.0), 1.0)


def cosine(step: float, phase: PhaseConfig) -> float:
    """Follow half a cosine from `lr` down to `min_lr`."""
    return phase.min_lr + 0.5 * (phase.lr - phase.min_lr) * (1.0 + math.cos(math.pi * progress(step, phase)))


def linear(step: float, phase: PhaseConfig) -> float:
    return _between(phase, SHAPES["linear"](progress(step, phase)))


def constant(step: float, phase: PhaseConfig) -> float:
    return phase.lr


def inverse_sqrt(step: float, phase: PhaseConfig) -> float:
    """Fall as 1 / sqrt(step) from `lr` at the end of the warm-up, as in Megatron-LM; not below `min_lr`."""
    return max(phase.min_lr, phase.lr * math.sqrt(min((phase.warmup_steps or 1) / (step + 1), 1.0)))


def wsd(step: float, phase: PhaseConfig) -> float:
    """Stay at `lr`, then fall over the last `decay_steps` steps. During the decay, the rate depends only on the number
    of remaining steps. A run that starts its decay from an earlier checkpoint therefore has, bit for bit, the rates of
    a run that planned this decay from the start."""
    into = step + 1 - (phase.steps - phase.decay_steps)
    share = min(max(into / phase.decay_steps, 0.0), 1.0)
    return phase.lr if share == 0 else _between(phase, SHAPES[phase.decay_shape](share))


def _between(phase: PhaseConfig, height: float) -> float:
    return phase.min_lr + (phase.lr - phase.min_lr) * height


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1.0 - share,
    "1-sqrt": lambda share: 1.0 - math.sqrt(share),
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}
"""Maps the finished share of the decay to the height of the rate between `min_lr` (0) and `lr` (1)."""

SCHEDULES: dict[str, Schedule] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "inverse_sqrt": inverse_sqrt,
    "wsd": wsd,
}
