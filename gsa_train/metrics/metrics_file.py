"""metrics.jsonl while a run writes it: each record whole or not at all, and none that fails ends the run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from gsa_train.metrics.lost_records import LostRecords

logger = logging.getLogger(__name__)


class MetricsFile:
    """Open for appending. Nothing waits in a buffer: a run killed after `write` has lost nothing."""

    def __init__(
        self, path: Path, to_line: Callable[[dict[str, Any]], str], lost: LostRecords | None = None
    ) -> None:
        self._path, self._folder_inode = path, path.parent.stat().st_ino
        self._file: FileIO = path.open("a+b", buffering=0)
        self._to_line = to_line
        self._size = self._file.tell()
        """Bytes of whole lines."""
        self._cut = False
        """Part of a line may stand behind them."""
        self.lost = lost or LostRecords(path.name)
        self.folder_was_gone = False
        """The folder was removed or moved while this file was open; it is there again, with this file alone."""

    def write(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Append a record; where that fails it is counted.

        Returns:
            An event that the other logs should have, too: the file failed, or works again.
        """
        try:
            self.restore()
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

    def restore(self) -> None:
        """Write the file again, as long as this process has it open, where someone has removed or replaced it."""
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return
        except FileNotFoundError:
            pass
        self._file.seek(0)
        content = self._file.readall()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.folder_was_gone |= self._path.parent.stat().st_ino != self._folder_inode
        restored = self._path.with_name(self._path.name + ".tmp")
        with restored.open("wb") as file:
            file.write(content)
        os.replace(restored, self._path)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)
        logger.error(
            "%s was removed, moved or replaced while the run writes it: it is written again, with all %d records",
            self._path,
            content.count(b"\n"),
        )

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
