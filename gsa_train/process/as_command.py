"""How a command ends that prints and is done: at Ctrl-C, without memory, and where what reads it has left, as `| head`
does."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

from gsa_train.process.exit_codes import INTERRUPTED

READER_LEFT = 141
"""What a shell makes of SIGPIPE, which ends other programs there."""


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Around such a command; `@as_command()` at its `main`. A line instead of a traceback at Ctrl-C and without memory,
    nothing where the reader has left.

    Not around training, which goes on without a reader, and heeds signals itself.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # at Python's own end it would be too late to catch
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = (str(error).splitlines() or ["of the host"])[0]
        print(
            f"out of memory: {reason}; give it less at once (shorter texts, or fewer), or more memory",
            file=sys.stderr,
        )
        sys.exit(1)
    except BrokenPipeError:
        if not _reader_left():  # another pipe or socket broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        sys.exit(READER_LEFT)


def _out_of_memory(error: Exception) -> bool:
    """Of the host or of a device; torch, which has no class of its own for the host, may not be loaded here."""
    is_devices = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_devices or "DefaultCPUAllocator: can't allocate" in str(error)


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))
