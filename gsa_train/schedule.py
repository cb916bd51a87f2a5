"""Learning-rate schedules: pure functions, without state in checkpoints.

To add one, write a function and add a row to SCHEDULES; `phases.decay` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float, float, float], float]
"""Progress since the learning-rate warm-up (1 at the phase's last step), `lr`, `min_lr` -> learning rate."""


def cosine(progress: float, lr: float, min_lr: float) -> float:
    """Half a cosine period from `lr` down to `min_lr`."""
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))


def constant(progress: float, lr: float, min_lr: float) -> float:
    return lr


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "constant": constant}
