"""Write a run's console output in a thread, so that no reader, terminal or disk can end or block a rank.

Streams that pass lines to the thread replace `sys.stdout` and `sys.stderr`. Lines wait in memory until the thread can
write them. A line is dropped if the waiting lines would exceed the memory limit, or if writing the line fails. When
writing succeeds again, a message gives the number of dropped lines.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

MOST_WAITING_BYTES = 1 << 20
"""Largest amount of waiting text."""
DRAIN_SECONDS = 5.0
"""Longest wait at the end of a process while nothing can be written."""
CHILD_SECONDS = 1.0
"""Longest wait at each flush of a forked child, which may end without notice."""


class _Chunk(NamedTuple):
    text: bytes
    lines: int
    """Number of lines lost if the chunk cannot be written."""


class ConsoleWriter:
    """Writes lines to one open file, in order. No method raises an OSError, and only `drain` waits for the file."""

    def __init__(self, descriptor: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self._descriptor, self._write = descriptor, write
        self._is_child = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin(self) -> None:
        self._changed = threading.Condition()  # reentrant lock: a signal handler may print
        self._thread: threading.Thread | None = None
        self._part = b""
        """Beginning of an incomplete line."""
        self._waiting: deque[_Chunk] = deque()
        self._waiting_bytes = self._done = self._dropped = 0
        self._failed, self._failure = 0, ""
        self._is_stuck = False

    def _begin_in_child(self) -> None:
        """Reset in a forked child, which has no thread. The parent writes the waiting lines."""
        self._begin()
        self._is_child = True

    def add(self, text: bytes) -> None:
        """Queue whole lines now. An incomplete line is queued once it is complete or at `flush`."""
        with self._changed:
            text = self._part + text
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._part = text[end:]
            self._put(text[:end])

    def flush(self) -> None:
        with self._changed:
            part, self._part = self._part, b""
            self._put(part)
        if self._is_child and not self._is_stuck:
            self.drain(CHILD_SECONDS)

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until all lines are written, or until nothing was written for `seconds`."""
        with self._changed:
            part, self._part = self._part, b""
            self._put(part)
            while self._waiting:
                if not self._changed.wait_for(partial(self._has_written_since, self._done), seconds):
                    self._is_stuck = True
                    return

    def _has_written_since(self, done: int) -> bool:
        return self._done != done

    def _put(self, text: bytes) -> None:
        if not text:
            return
        chunk = _Chunk(text, max(1, text.count(b"\n")))
        if self._waiting and self._waiting_bytes + len(text) > MOST_WAITING_BYTES:
            self._dropped += chunk.lines
            return
        self._tell_dropped()
        self._append(chunk)

    def _tell_dropped(self) -> None:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self._append(_Chunk(_lost(count, "nothing read them in time"), count))

    def _append(self, chunk: _Chunk) -> None:
        self._waiting.append(chunk)
        self._waiting_bytes += len(chunk.text)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # The limit of threads is reached: the next line tries again.
                self._thread = None
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                chunk = self._waiting[0]
            text = _lost(self._failed, self._failure) + chunk.text if self._failed else chunk.text
            try:
                self._write_all(text)
                self._failed = 0
            except OSError as error:
                self._failed += chunk.lines
                self._failure = str(error)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(chunk.text)
                self._done += 1
                self._is_stuck = False
                if not self._waiting:
                    self._tell_dropped()
                self._changed.notify_all()

    def _write_all(self, text: bytes) -> None:
        while text:
            try:
                text = text[self._write(self._descriptor, text) :]
            except BlockingIOError:  # Another process made the shared terminal or pipe non-blocking.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


def _lost(count: int, why: str) -> bytes:
    return f"\n({count} lines could not be written here: {why})\n".encode()


class _Console(io.RawIOBase):
    def __init__(self, descriptor: int, writer: ConsoleWriter) -> None:
        self._descriptor, self._writer = descriptor, writer

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: bytes | memoryview) -> int:  # type: ignore[override]  # of anything with a buffer
        self._writer.add(bytes(text))
        return len(text)

    def flush(self) -> None:
        self._writer.flush()


_writers: list[ConsoleWriter] = []
"""Writers of this process."""


def open_descriptors() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed. Otherwise, the next file that the process
    opens, such as a checkpoint, would get the number of the closed stream and receive console output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                continue
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)  # no effect if the numbers are equal
            os.set_inheritable(descriptor, True)
            if null != descriptor:
                os.close(null)


def take_console() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that pass lines to a writer thread. A stream that has
    already been replaced is left unchanged. Call `open_descriptors` first."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    writers: dict[tuple[int, int], ConsoleWriter] = {}
    for descriptor, (name, stream) in enumerate(streams.items(), start=1):
        if (stream is not None and _number(stream) != descriptor) or isinstance(
            getattr(stream, "buffer", None), _Console
        ):
            continue
        file = os.fstat(descriptor)
        # If both are the same file, they share a queue, so that their lines keep their order.
        writer = writers.setdefault((file.st_dev, file.st_ino), ConsoleWriter(descriptor))
        setattr(sys, name, console_stream(descriptor, writer, stream.encoding if stream else "utf-8"))
    for writer in writers.values():
        _writers.append(writer)
        atexit.register(writer.drain)


def console_stream(descriptor: int, writer: ConsoleWriter, encoding: str) -> io.TextIOWrapper:
    """Returns a text stream to `writer`. Characters that the encoding lacks are escaped."""
    return io.TextIOWrapper(
        _Console(descriptor, writer),  # type: ignore[arg-type]  # as Python's own unbuffered streams have one
        encoding=encoding,
        errors="backslashreplace",
        write_through=True,
    )


def drain_console() -> None:
    """Write all waiting lines, for DRAIN_SECONDS at most without progress. Call it before `os._exit`."""
    for writer in _writers:
        writer.drain()


def _number(stream: io.TextIOBase) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # The stream has no file.
        return stream.fileno()
    return None
