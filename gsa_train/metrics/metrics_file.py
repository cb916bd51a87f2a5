"""metrics.jsonl while a run writes it: each record whole or not at all, and none that fails ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gsa_train.metrics.lost_records import LostRecords


class MetricsFile:
    """Open for appending. Nothing waits in a buffer: a run killed after `write` has lost nothing."""

    def __init__(
        self, path: Path, to_line: Callable[[dict[str, Any]], str], lost: LostRecords | None = None
    ) -> None:
        self._file = path.open("ab", buffering=0)
        self._to_line = to_line
        self._size = self._file.tell()
        """Bytes of whole lines."""
        self._cut = False
        """Part of a line may stand behind them."""
        self.lost = lost or LostRecords(path.name)

    def write(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Append a record; where that fails it is counted.

        Returns:
            An event that the other logs should have, too: the file failed, or works again.
        """
        try:
            self._append(record)
        except OSError as error:
            return self.lost.add(record, error)
        if self.lost.count == 0:
            return None
        event = self.lost.end(record)
        with contextlib.suppress(OSError):  # it was said; the next record finds out
            self._append(event)
        return event

    @property
    def works(self) -> bool:
        """Whether it took the last record."""
        return self.lost.count == 0

    def close(self) -> None:
        """A part of a line at the end is what readers leave out."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        line = (self._to_line(record) + "\n").encode()
        if self._cut:
            self._file.truncate(self._size)
        self._cut = True
        written = 0
        while written < len(line):  # on an almost full disk a write takes a part, and the next one fails
            written += self._file.write(line[written:])
        self._size += len(line)
        self._cut = False
