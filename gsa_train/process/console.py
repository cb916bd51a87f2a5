"""The console of a run: a thread writes it, so that no reader, terminal or disk can end or block a rank.

Whatever Python code prints, logs or warns of goes through it: `sys.stdout` and `sys.stderr` are replaced. Lines wait in
memory while nothing takes them; those beyond a bound, and those that cannot be written, are counted, and the count is
written as soon as a line can be.
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
"""Of text that nothing has read yet."""
DRAIN_SECONDS = 5.0
"""How long the end of a process waits for a reader that takes nothing."""
CHILD_SECONDS = 1.0
"""The same in a forked child, whenever it flushes: it may end without notice."""


class _Chunk(NamedTuple):
    text: bytes
    lines: int
    """That are lost where it cannot be written."""


class ConsoleWriter:
    """Lines to one open file, in order. No method raises an OSError or waits for the file, except `drain`."""

    def __init__(self, descriptor: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self._descriptor, self._write = descriptor, write
        self._is_child = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin(self) -> None:
        self._changed = threading.Condition()  # its lock can be taken again by a signal's handler
        self._thread: threading.Thread | None = None
        self._part = b""
        """Of a line that is not complete."""
        self._waiting: deque[_Chunk] = deque()
        self._waiting_bytes = self._done = self._dropped = 0
        self._failed, self._failure = 0, ""
        self._is_stuck = False

    def _begin_in_child(self) -> None:
        """It has no thread; the parent writes what waits."""
        self._begin()
        self._is_child = True

    def add(self, text: bytes) -> None:
        """Whole lines go to the thread now, the rest with its end or with `flush`."""
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
        """Wait until all is written. Gives up where nothing was written for `seconds`."""
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
            except RuntimeError:  # of a process that may have no more threads: the next line tries again
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
            except BlockingIOError:  # whoever shares the terminal or pipe has made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


def _lost(count: int, why: str) -> bytes:
    return f"\n({count} lines could not be written here: {why})\n".encode()


class _Console(io.RawIOBase):
    """What stands below `sys.stdout` or `sys.stderr`."""

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
"""Of this process, which has one console."""


def open_descriptors() -> None:
    """Where stdin, stdout or stderr is closed, /dev/null stands for it: else the next file that is opened, such as a
    checkpoint, would have its number, and get what is written there."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                continue
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)  # of the same number it is left as it is
            os.set_inheritable(descriptor, True)
            if null != descriptor:
                os.close(null)


def take_console() -> None:
    """From now on a thread writes what goes to `sys.stdout` and `sys.stderr`; a stream that someone has put in their
    place stays. Call `open_descriptors` before."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    writers: dict[tuple[int, int], ConsoleWriter] = {}
    for descriptor, (name, stream) in enumerate(streams.items(), start=1):
        if (stream is not None and _number(stream) != descriptor) or isinstance(
            getattr(stream, "buffer", None), _Console
        ):
            continue
        file = os.fstat(descriptor)
        # One queue for both where they are the same file, so that their lines keep their order.
        writer = writers.setdefault((file.st_dev, file.st_ino), ConsoleWriter(descriptor))
        setattr(sys, name, console_stream(descriptor, writer, stream.encoding if stream else "utf-8"))
    for writer in writers.values():
        _writers.append(writer)
        atexit.register(writer.drain)


def console_stream(descriptor: int, writer: ConsoleWriter, encoding: str) -> io.TextIOWrapper:
    """Of whole lines to `writer`; a character that the encoding lacks becomes its escape."""
    return io.TextIOWrapper(
        _Console(descriptor, writer),  # type: ignore[arg-type]  # as Python's own unbuffered streams have one
        encoding=encoding,
        errors="backslashreplace",
        write_through=True,
    )


def drain_console() -> None:
    """Before `os._exit`: what was said is written, unless its reader takes nothing."""
    for writer in _writers:
        writer.drain()


def _number(stream: io.TextIOBase) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # of one that is no file
        return stream.fileno()
    return None
