"""Where a run's records and messages go: metrics files, TensorBoard, W&B, and the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gsa_train.metrics.progress import Progress
from gsa_train.metrics.sinks import Sinks


@dataclass(frozen=True)
class RunLog:
    """On the main rank both sinks and console; on the others neither, and nothing is written."""

    sinks: Sinks | None
    console: Progress | None
    wandb_run_id: str | None
    """On every rank: checkpoints keep it, so that a restart continues the same W&B run."""
    wandb_place: tuple[str, ...] = ()
    """On the main rank: where the W&B run is, in lines for the console."""
    writes_late: bool = False
    """A step's record is made and written once the next step's work is queued: on a GPU, which would otherwise wait
    for the host meanwhile."""
    late: list[Callable[[], None]] = field(default_factory=list)
    """What makes and writes the records that are to come."""

    def log(self, record: dict[str, Any]) -> None:
        """Write a record at once, after the late ones."""
        self.write_late()
        if self.sinks is not None:
            self.sinks.log(_stamped(record))
        if self.console is not None:
            self.console.show(record)

    def log_late(self, make_and_log: Callable[[], None]) -> None:
        """Call it by `write_late`, or before the next record is written; at once without `writes_late`. On every rank;
        no collective may be in it, as the ranks do not come to it together."""
        self.late.append(make_and_log)
        if not self.writes_late:
            self.write_late()

    def log_samples(self, record: dict[str, Any]) -> None:
        """Write what the model made of fixed prompts: `samples`, a list with `prompt`, `text` and `ended`."""
        self.write_late()
        if self.sinks is not None:
            self.sinks.log_samples(_stamped(record))

    def write_late(self) -> None:
        """Make and write what is late."""
        while self.late:
            self.late.pop(0)()

    @property
    def folder_was_gone(self) -> bool:
        """On the main rank: someone has removed or moved the run folder. Its metrics are there again."""
        return self.sinks is not None and self.sinks.folder_was_gone

    def message(self, text: str) -> None:
        if self.console is not None:
            self.console.message(text)

    def go_back(self, step: int) -> None:
        """The steps after `step` run again: their records leave metrics.jsonl."""
        self.write_late()
        if self.sinks is not None and self.console is not None:
            self.sinks.go_back(step)
            self.console.go_back(step)

    def close(self, exit_code: int) -> None:
        """Close without a summary."""
        self.write_late()
        if self.sinks is not None and self.console is not None:
            self.console.close()
            self.sinks.close(exit_code)


def _stamped(record: dict[str, Any]) -> dict[str, Any]:
    """With the time of its making, in Unix seconds, as W&B and TensorBoard note theirs."""
    return {**record, "time": time.time()}
