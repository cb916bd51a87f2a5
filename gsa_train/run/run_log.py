"""Where a run's records and messages go: metrics files, TensorBoard, W&B, and the console."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gsa_train.metrics.progress import Progress
from gsa_train.metrics.sinks import Sinks


@dataclass(frozen=True)
class RunLog:
    """On the main rank both sinks and console; on the others neither, and every method does nothing."""

    sinks: Sinks | None
    console: Progress | None
    wandb_run_id: str | None
    """On every rank: checkpoints keep it, so that a restart continues the same W&B run."""
    wandb_place: tuple[str, ...] = ()
    """On the main rank: where the W&B run is, in lines for the console."""
    writes_late: bool = False
    """A step's record is written once the next step's work is queued: on a GPU, which would otherwise wait while the
    host writes."""

    def log(self, record: dict[str, Any]) -> None:
        """Write a record at once."""
        if self.sinks is not None and self.console is not None:
            self.sinks.log(_stamped(record))
            self.console.show(record)

    def log_step(self, record: dict[str, Any]) -> None:
        """Write the record of a step, perhaps late: by `write_late`, or before the next record."""
        if not self.writes_late:
            self.log(record)
        elif self.sinks is not None and self.console is not None:
            self.sinks.log_later(_stamped(record))
            self.console.show(record)

    def log_samples(self, record: dict[str, Any]) -> None:
        """Write what the model made of fixed prompts: `samples`, a list with `prompt`, `text` and `ended`."""
        if self.sinks is not None:
            self.sinks.log_samples(_stamped(record))

    def write_late(self) -> None:
        if self.sinks is not None:
            self.sinks.write_late()

    def message(self, text: str) -> None:
        if self.console is not None:
            self.console.message(text)

    def go_back(self, step: int) -> None:
        """The steps after `step` run again: their records leave metrics.jsonl."""
        if self.sinks is not None and self.console is not None:
            self.sinks.go_back(step)
            self.console.go_back(step)

    def close(self, exit_code: int) -> None:
        """Close without a summary."""
        if self.sinks is not None and self.console is not None:
            self.console.close()
            self.sinks.close(exit_code)


def _stamped(record: dict[str, Any]) -> dict[str, Any]:
    """With the time of its making, in Unix seconds, as W&B and TensorBoard note theirs."""
    return {**record, "time": time.time()}
