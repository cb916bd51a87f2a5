"""What the loop's events add to the account of a run's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gsa_train.config import PhaseConfig
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.record import Reduced
from gsa_train.services import Service, StepPlan


@dataclass
class GoodputNotes(Service):
    goodput: GoodputLog
    message: Callable[[str], None]
    held_seconds: Callable[[], float]
    """Since its last call, in which updates waited for a checkpoint's copies."""
    straggler_ratio: float
    _phase: str = ""
    _is_first: bool = True
    """This process has trained no step of the phase: its first one compiles."""
    _first_wait_seconds: float | None = None
    """That the first step waited for text; None before it, and once a step is logged."""

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        self._phase, self._is_first, self._first_wait_seconds = phase.name, True, None
        self.goodput.clock.begin("training")

    def before_step(self, plan: StepPlan) -> None:
        if plan.trains and self._is_first:
            self.goodput.clock.begin("first_step")

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        if self._is_first:
            self._first_wait_seconds = wait_seconds

    def on_record(self, record: dict[str, Any], numbers: Reduced) -> None:
        """What of the steps since the last logged one was no work."""
        rank, ratio = record["slowest_rank"], record["slowest_rank_ratio"]
        # In the first step ranks differ, as they compile.
        slow = ratio >= self.straggler_ratio and self._first_wait_seconds is None
        waited = numbers.part_seconds["data_wait"] - (self._first_wait_seconds or 0.0)
        self._first_wait_seconds = None
        stragglers = numbers.work_seconds[rank] * (1 - 1 / ratio) if slow else 0.0
        self.goodput.clock.share_out(
            {"text": waited, "stragglers": stragglers, "copies": self.held_seconds()}
        )
        self.goodput.note(record["step"], self._phase)
        record |= self.goodput.metrics()

    def after_step(self, plan: StepPlan) -> None:
        if plan.trains and self._is_first:
            self._is_first = False
            self.goodput.note(plan.step, self._phase)
            said = self.goodput.start_up_in_words()
            self.goodput.clock.begin("training")
            if said is not None:
                self.message(said)

    def on_save(self, step: int) -> None:
        self.goodput.note(step, self._phase)

    def end_phase(self, step: int) -> None:
        self.goodput.note(step, self._phase)
        self.goodput.clock.begin("other")

    def on_stop(self) -> None:
        self.goodput.close()
