"""Learning-rate schedules as pure functions: nothing to save, nothing to restore.

A new one is a function and a row of SCHEDULES; `phases.decay` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float, float, float], float]
"""Progress after the learning-rate warm-up, from 0 to 1 at the phase's last step; `lr`; `min_lr` -> learning rate."""


def cosine(progress: float, lr: float, min_lr: float) -> float:
    """Half a cosine from `lr` down to `min_lr`."""
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))


def constant(progress: float, lr: float, min_lr: float) -> float:
    return lr


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "constant": constant}
