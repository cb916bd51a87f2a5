"""Compute learning rates as pure functions, which need no state in checkpoints.

To add a schedule, write a function and add a row to SCHEDULES; `phases.decay` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gsa_train.config import PhaseConfig

Schedule = Callable[[float, PhaseConfig], float]
"""Maps the progress after the learning-rate warm-up (1 at the phase's last step) and the phase to the learning
rate."""


def cosine(progress: float, phase: PhaseConfig) -> float:
    """Follow half a cosine from `lr` down to `min_lr`."""
    return phase.min_lr + 0.5 * (phase.lr - phase.min_lr) * (1.0 + math.cos(math.pi * progress))


def constant(progress: float, phase: PhaseConfig) -> float:
    return phase.lr


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "constant": constant}
