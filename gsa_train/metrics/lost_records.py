"""Count the records that a run could not write, because the disk was full or the file system failed, and report them.

The first report is made when a file fails. The second, when the file works again, says how many records waited or are
missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class Outage:
    """Reports when a file fails and works again, and counts lost records. Other records wait (metrics_file.py).

    Args:
        meanwhile: what happens to the records, for the message.
    """

    def __init__(self, name: str, meanwhile: str) -> None:
        self.name, self._meanwhile = name, meanwhile
        self._lasts = False
        self._lost = 0
        self._first_step = self._last_step = 0
        """First and last step of the lost records."""

    def go_on(self, record: Mapping[str, Any], error: OSError) -> dict[str, Any] | None:
        """Note a record that could not be written. Returns an event for the other logs at the first failure."""
        if self._lasts:
            return None
        self._lasts = True
        logger.error(
            "step %d: %s cannot be written (%s); training goes on, and %s",
            record["step"],
            self.name,
            error,
            self._meanwhile,
        )
        return _event("log_failed", record, self.name, reason=str(error))

    def lose(self, steps: Iterable[int]) -> None:
        """Count the records of these steps, the oldest first, as lost."""
        for step in steps:
            self._first_step = self._first_step if self._lost else step
            self._last_step = step
            self._lost += 1

    def end(self, record: Mapping[str, Any], waited: int = 0) -> dict[str, Any] | None:
        """Note that the file has received `record`, after `waited` records that had to wait.

        If an earlier write to this file failed, returns an event for the run's other logs. `MetricsFile` also appends
        events with the key `lost_records` to its own file, to mark the gap.
        """
        if not self._lasts and not self._lost:
            return None
        those = f", with {waited} records that waited" if waited else ""
        said = f"step {record['step']}: {self.name} is written again{those}"
        if not self._lost:
            logger.warning("%s; it lacks none", said)
            self._lasts = False
            return _event("log_written", record, self.name)
        logger.warning("%s; it lacks %s", said, self._missing())
        steps = {"first_step": self._first_step, "last_step": self._last_step}
        event = _event("log_lost", record, self.name, lost_records=self._lost, **steps)
        self._lasts, self._lost = False, 0
        return event

    def say_lost(self) -> None:
        """Report lost records, if any, when the file is closed."""
        if self._lost:
            logger.error("%s lacks %s, since it could not be written", self.name, self._missing())

    def _missing(self) -> str:
        return f"{self._lost} records of steps {self._first_step} to {self._last_step}"


def _event(event: str, record: Mapping[str, Any], file: str, **values: Any) -> dict[str, Any]:
    place = {name: record[name] for name in ("step", "phase", "time") if name in record}
    return {"event": event, **place, "file": file, **values}
