"""Write a run's records and messages to metrics files, TensorBoard, W&B and the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gsa_train.metrics.progress import Progress
from gsa_train.metrics.sinks import Sinks


@dataclass(frozen=True)
class RunLog:
    """Log of a run. Only the main rank has sinks and a console; other ranks write nothing."""

    sinks: Sinks | None
    console: Progress | None
    wandb_run_id: str | None
    """Id of the W&B run, on every rank. Checkpoints store it, so that a restart continues the same W&B run."""
    wandb_place: tuple[str, ...] = ()
    """Console lines that say where the W&B run is, on the main rank."""
    writes_late: bool = False
    """True on GPUs, where a step's record is written after the next step is launched, so that the GPU does not
    wait."""
    late: list[Callable[[], None]] = field(default_factory=list)
    """Functions that write the pending records."""

    def log(self, record: dict[str, Any]) -> None:
        """Write the pending records, then this one."""
        self.write_late()
        if self.sinks is not None:
            self.sinks.log({**record, "time": time.time()})
        if self.console is not None:
            self.console.show(record)

    def log_late(self, make_and_log: Callable[[], None]) -> None:
        """Queue a function that builds and writes a record. `write_late` calls the function later. If `writes_late` is
        False, the function is called at once. It must not use collectives, because the ranks call it at different
        times."""
        self.late.append(make_and_log)
        if not self.writes_late:
            self.write_late()

    def write_late(self) -> None:
        while self.late:
            self.late.pop(0)()

    def message(self, text: str) -> None:
        if self.console is not None:
            self.console.message(text)

    def close(self, exit_code: int) -> None:
        self.write_late()
        if self.sinks is not None and self.console is not None:
            self.console.close()
            self.sinks.close(exit_code)
