"""Write metrics.jsonl: each record whole and in order. A failed write does not end the run.

Records that cannot be written wait in memory until the disk has room.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from gsa_train.files import open_to_append, write_atomically
from gsa_train.metrics.lost_records import Outage
from gsa_train.metrics.record_format import to_json

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 << 20
"""Limit of records in memory, which is thousands of records. Beyond it the oldest records are lost."""


class _Waiting(NamedTuple):
    step: int
    line: bytes


class MetricsFile:
    """Appends to the file. While writes succeed no record waits: a run killed after `write` has lost nothing."""

    def __init__(self, path: Path, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self._path, self._folder_inode = path, path.parent.stat().st_ino
        self._file: FileIO = open_to_append(path)
        self._size = self._file.tell()
        """Bytes of whole lines."""
        self._cut = False
        """Whether an incomplete line may follow them."""
        self._waiting: deque[_Waiting] = deque()
        self._most_waiting_bytes = most_waiting_bytes
        self._outage = Outage(path.name, "its records wait in memory")
        self.folder_was_gone = False
        """Whether the folder was removed or moved while this file was open; it exists again, with only this file."""

    def write(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Append a record after the waiting records. If it cannot be written, it waits, too.

        Returns:
            An event for the other logs if the file failed, or works again.
        """
        self._wait(record)
        try:
            self.restore()
            waited = self._write_waiting()
        except OSError as error:
            self._bound()
            return self._outage.go_on(record, error)
        event = self._outage.end(record, waited - 1)
        if event is not None and "lost_records" in event:
            self._wait(event)
            with contextlib.suppress(OSError):  # the next record tries again
                self._write_waiting()
        return event

    @property
    def works(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        """Write the waiting records, or count them as lost."""
        with contextlib.suppress(OSError):
            if self._waiting:
                self.restore()
            self._write_waiting()
        self._outage.lose(each.step for each in self._waiting)
        self._waiting.clear()
        self._outage.say_lost()
        self._file.close()

    def restore(self) -> None:
        """Write a removed or replaced file again, from the copy that this process holds open."""
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.lstat()
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return
        except FileNotFoundError:
            pass
        self._file.seek(0)
        content = self._file.readall()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.folder_was_gone |= self._path.parent.stat().st_ino != self._folder_inode
        write_atomically(self._path, content)
        self._file.close()
        self._file = open_to_append(self._path)
        logger.error(
            "%s was removed, moved or replaced during the run: it is written again, with all %d records",
            self._path,
            content.count(b"\n"),
        )

    def _wait(self, record: dict[str, Any]) -> None:
        self._waiting.append(_Waiting(record["step"], (to_json(record) + "\n").encode()))

    def _bound(self) -> None:
        excess = sum(len(each.line) for each in self._waiting) - self._most_waiting_bytes
        while excess > 0:
            oldest = self._waiting.popleft()
            excess -= len(oldest.line)
            self._outage.lose([oldest.step])

    def _write_waiting(self) -> int:
        """Write all waiting records and return their number, or raise OSError."""
        count = 0
        while self._waiting:
            self._append(self._waiting[0].line)
            self._waiting.popleft()
            count += 1
        return count

    def _append(self, line: bytes) -> None:
        """Write a whole line, or raise OSError. After an error, the incomplete line is removed, at the latest by the
        next call."""
        self._take_back_cut()
        self._cut = True
        try:
            written = 0
            # On an almost full disk a write may be partial, and the next one fails.
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                self._take_back_cut()
            raise
        self._size += len(line)
        self._cut = False

    def _take_back_cut(self) -> None:
        if self._cut:
            self._file.truncate(self._size)
            self._cut = False
