"""Compute how long a rank may make no progress.

During a step, the limit is a multiple of the longest recent step time. At other times, the limit is
`parallel.timeout_minutes`, because reads, compilation, validation, saves and logs may take long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

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
"""Activities of the main thread after each step, in order. The rank with the earliest activity holds up the others."""
STEP = "training"
"""The activity whose limit follows the step times."""
SILENT = ("starting", "compiling", "ending")
"""Activities that may block the heartbeat thread, such as a call of a compiler."""
TIMES_THE_SLOWEST = 5.0
RECENT_STEPS = 32
FEWEST_STEPS = 3
"""Number of measured steps before the limit follows them. Until then the longest limit applies."""
LEAST_SECONDS = 40.0
"""Shortest limit of a step. A hang is thus reported within a minute, and a network may recover for half a minute."""


class StepLimit:
    def __init__(
        self, longest_seconds: float, fixed_seconds: float = 0.0, least_seconds: float = LEAST_SECONDS
    ):
        """
        Args:
            longest_seconds: limit of all other activities, and upper bound of a step's limit.
            fixed_seconds: fixed limit of a step; 0: the limit follows the step times.
            least_seconds: lower bound of a limit that follows the step times.
        """
        self.longest_seconds = longest_seconds
        self._fixed_seconds, self._least_seconds = fixed_seconds, least_seconds
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    @property
    def interval_seconds(self) -> float:
        """Returns the time between two reads of the heartbeats, which is short enough for the shortest limit."""
        return min(self.longest_seconds, self._fixed_seconds or self._least_seconds) / 20

    def add(self, seconds: float) -> None:
        """Add the time of a step, without reading of text and compilation."""
        self._recent.append(seconds)

    def forget(self) -> None:
        """Forget the step times, because the next steps are of another kind."""
        self._recent.clear()

    @property
    def seconds(self) -> float:
        if self._fixed_seconds > 0:
            return min(self._fixed_seconds, self.longest_seconds)
        if len(self._recent) < FEWEST_STEPS:
            return self.longest_seconds
        return min(self.longest_seconds, max(self._least_seconds, TIMES_THE_SLOWEST * max(self._recent)))


def step_limit(config: ParallelConfig) -> StepLimit:
    return StepLimit(60 * config.timeout_minutes, config.hang_limit_seconds)


def watch_compilation(compiling: Callable[[bool], None]) -> None:
    """Make Triton call `compiling(True)` before it compiles a kernel, and `compiling(False)` afterwards. Any step may
    compile a kernel, because the choice of kernels depends on the selected keys."""
    from triton import knobs

    # jit_cache_hook must not return True, which would keep Triton from compiling.
    knobs.runtime.jit_cache_hook = lambda **_: compiling(True)
    knobs.runtime.jit_post_compile_hook = lambda **_: compiling(False)
