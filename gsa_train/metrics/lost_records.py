"""What a run's logs do not take, on a full disk or a file system that fails: it is counted and said, and no more.

Said when a file first fails, and again when it works, with the number of records that are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class LostRecords:
    """Of one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        """In a row, up to the last record."""
        self._first_step = self._last_step = 0

    def add(self, record: Mapping[str, Any], error: OSError | None = None) -> dict[str, Any] | None:
        """Count a record. Returns an event to tell elsewhere if it is the first.

        Args:
            error: None where it was not tried again.
        """
        self._last_step = record["step"]
        self.count += 1
        if self.count > 1:
            return None
        self._first_step = record["step"]
        logger.error(
            "step %d: %s cannot be written (%s); training goes on, and what it misses is counted",
            record["step"],
            self.name,
            error,
        )
        return self._event("log_failed", record, reason=str(error))

    def end(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The file works again at `record`. Returns an event that says what is missing."""
        lost, self.count = self.count, 0
        logger.warning(
            "step %d: %s is written again; it misses %d records of steps %d to %d",
            record["step"],
            self.name,
            lost,
            self._first_step,
            self._last_step,
        )
        steps = {"first_step": self._first_step, "last_step": self._last_step}
        return self._event("log_lost", record, lost_records=lost, **steps)

    def _event(self, event: str, record: Mapping[str, Any], **values: Any) -> dict[str, Any]:
        place = {name: record[name] for name in ("step", "phase", "time") if name in record}
        return {"event": event, **place, "file": self.name, **values}
