"""How long a rank may show no progress: in steps so long as the recent ones suggest, elsewhere `timeout_minutes`.

What takes long without being a hang has limits of its own, or none that a step could tell: reading text that must be
tried again, compilation, a validation, a save, a file system that stands still under the logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from gsa_train.config import ParallelConfig

ACTIVITIES = (
    "starting",
    "logging",
    "validating",
    "scoring tasks",
    "saving",
    "reading text",
    "compiling",
    "training",
    "ending",
)
"""What a main thread does after a number of steps, in this order: the others wait for the rank that is behind."""
STEP = "training"
"""The activity whose limit follows the steps."""
SILENT = ("starting", "compiling", "ending")
"""Activities that may keep the heartbeat's thread from running, as one call of a compiler does."""
TIMES_THE_SLOWEST = 5.0
RECENT_STEPS = 32
FEWEST_STEPS = 3
"""Until this number is known, the longest limit holds."""
LEAST_SECONDS = 40.0
"""So that a hang is reported within a minute, and a network that recovers in half of one goes on."""


class StepLimit:
    """Of one rank."""

    def __init__(
        self, longest_seconds: float, fixed_seconds: float = 0.0, least_seconds: float = LEAST_SECONDS
    ):
        """
        Args:
            longest_seconds: of everything that is no step, and no step has more.
            fixed_seconds: of a step; 0 follows the steps.
            least_seconds: of a step, where its limit follows the steps.
        """
        self.longest_seconds = longest_seconds
        self._fixed_seconds, self._least_seconds = fixed_seconds, least_seconds
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    @property
    def interval_seconds(self) -> float:
        """Of a look at the ranks: often enough for the shortest limit."""
        return min(self.longest_seconds, self._fixed_seconds or self._least_seconds) / 20

    def add(self, seconds: float) -> None:
        """A step took so long, text and compilation left out."""
        self._recent.append(seconds)

    def forget(self) -> None:
        """Other steps begin: how long those before took says nothing of them."""
        self._recent.clear()

    @property
    def seconds(self) -> float:
        """That a step may take now."""
        if self._fixed_seconds > 0:
            return min(self._fixed_seconds, self.longest_seconds)
        if len(self._recent) < FEWEST_STEPS:
            return self.longest_seconds
        return min(self.longest_seconds, max(self._least_seconds, TIMES_THE_SLOWEST * max(self._recent)))


def step_limit(config: ParallelConfig) -> StepLimit:
    return StepLimit(60 * config.timeout_minutes, config.hang_limit_seconds)


def watch_compilation(compiling: Callable[[bool], None]) -> None:
    """Have Triton tell when a kernel begins to be compiled (True) and when it is (False): in any step, as attention
    changes kernels with the density of its selections."""
    from triton import knobs

    def before(**_: Any) -> None:
        compiling(True)

    def after(**_: Any) -> None:
        compiling(False)

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after
