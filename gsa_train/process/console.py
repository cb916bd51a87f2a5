"""Let no closed terminal, missing reader or full disk end a process that prints."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys


class _Console(io.RawIOBase):
    """Writes to one open file without a lock, because a signal handler may print. Text that fails is lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: bytes | memoryview) -> int:  # type: ignore[override]  # of anything with a buffer
        left = bytes(text)
        with contextlib.suppress(OSError):
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # another process made the shared terminal or pipe non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        return len(text)


def open_descriptors() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed. Otherwise the next opened file, such as a
    checkpoint, would get the free descriptor and receive console output."""
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
    """Replace `sys.stdout` and `sys.stderr` by streams that never fail. Characters that the encoding lacks are escaped.
    A stream that was already replaced stays. Call `open_descriptors` before."""
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        is_other = stream is not None and _number(stream) != descriptor
        if not is_other and not isinstance(getattr(stream, "buffer", None), _Console):
            console = io.TextIOWrapper(  # type: ignore[type-var]
                _Console(descriptor),  # type: ignore[arg-type]  # as Python's own unbuffered streams have one
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",
                line_buffering=True,  # whole lines, because ranks share a terminal
            )
            setattr(sys, name, console)


def _number(stream: io.TextIOBase) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream has no file
        return stream.fileno()
    return None
