"""A step's plan, and the services that the loop tells of it: they watch the run, or act between its steps. The list of
them, and with it their order, is `services_of` in train.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gsa_train.config import PhaseConfig


@dataclass(frozen=True)
class StepPlan:
    """The actions of one step, in order of execution. Steps are counted from 1."""

    step: int
    trains: bool
    """False: its batch is read and skipped."""
    left_out_through: int | None
    """For the log: the last of the consecutive skipped steps that start here; None elsewhere."""
    logs: bool
    """Measure the attention and write a metrics record."""
    validates: bool
    scores_tasks: bool
    saves: bool
    ends_phase: bool
    ends_run: bool

    @property
    def pauses(self) -> bool:
        """Training waits after the step."""
        return self.validates or self.scores_tasks or self.saves or self.ends_phase

    @property
    def reads_monitor(self) -> bool:
        """Logging, validation, saves and the end of a phase wait for the monitor's verdict on the step."""
        return self.logs or self.pauses

    @property
    def weights_are_kept(self) -> bool:
        """The weights after this step go into a checkpoint."""
        return self.saves or self.ends_run


class Service:
    """Overrides the events that it needs; the others do nothing. Ranks come to each event in the same order, but not
    at the same time: only `on_validate` and `on_tasks` may use collectives."""

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        """`start`: the last step before the phase."""

    def before_step(self, plan: StepPlan) -> None:
        """Before the step's text is read."""

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[Any], wait_seconds: float) -> None:
        """The step trains on these `data.batches.MicroBatch`, for which it waited."""

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        """Before a logged step's record is written: a service may add to it. On GPUs this is after the next step is
        launched.

        Args:
            numbers: the `metrics.record.Reduced` from which it was made.
        """

    def after_step(self, plan: StepPlan) -> None:
        """The step is trained or left out, and logged; it is not yet saved."""

    def on_validate(self, step: int, phase: str, stop_if_asked: Callable[[], None]) -> None:
        """The validation sets are scored, and not yet logged. `stop_if_asked` may raise to end the validation."""

    def on_save(self, step: int) -> None:
        """A checkpoint begins."""

    def on_tasks(self, step: int, phase: str, stop_if_asked: Callable[[], None]) -> None:
        """After the save, if there is one: tasks may take long, and an error in them costs no step."""

    def end_phase(self, step: int) -> None:
        """After the phase's last step."""

    def on_stop(self) -> None:
        """Training is over, whatever ended it."""

    def on_complete(self) -> None:
        """The run is complete, and this process has left its process group."""
