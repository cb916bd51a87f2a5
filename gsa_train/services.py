"""Define `StepPlan`, and `Service`, the base class of objects that the training loop calls at its events.

`services_of` in train.py lists the services in call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gsa_train.config import PhaseConfig


@dataclass(frozen=True)
class StepPlan:
    """Lists the actions of one step, in order of execution. Steps are counted from 1."""

    step: int
    trains: bool
    """Whether the step trains. If False, its batch is read and skipped."""
    left_out_through: int | None
    """In the first of one or more consecutive skipped steps: the last of them, for the log. Otherwise None."""
    logs: bool
    """Whether to measure the attention and write a metrics record."""
    validates: bool
    scores_tasks: bool
    saves: bool
    ends_phase: bool
    ends_run: bool

    @property
    def pauses(self) -> bool:
        return self.validates or self.scores_tasks or self.saves or self.ends_phase

    @property
    def reads_monitor(self) -> bool:
        """Returns True if the step is logged or training pauses, which needs the monitor's verdict on the step."""
        return self.logs or self.pauses

    @property
    def weights_are_kept(self) -> bool:
        """Returns True if the weights after this step go into a checkpoint."""
        return self.saves or self.ends_run


class Service:
    """Base class of services. Each method handles an event and does nothing by default. Do not use collectives in a
    method: ranks call it at different times, and would wait for each other."""

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        """Called before the phase's first step. `start` is the last step before the phase."""

    def before_step(self, plan: StepPlan) -> None:
        """Called before the step's batch is read."""

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        """Called after the step's list of `data.batches.MicroBatch` was read. The read took `wait_seconds`."""

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        """Called before the record of a logged step is written. A service may add values to the record. On GPUs, the
        next step has already been launched at this time.

        Args:
            numbers: the `metrics.record.Reduced` that the record was made from.
        """

    def after_step(self, plan: StepPlan) -> None:
        """Called after the step was trained (or skipped) and logged, and before a save."""

    def on_save(self, step: int) -> None:
        """Called when a save begins."""

    def end_phase(self, step: int) -> None:
        """Called after the phase's last step."""

    def on_stop(self) -> None:
        """Called when training ends, after an error too."""
