"""End a short command without a traceback on Ctrl-C, when memory is exhausted, or when the process that reads the
output (as in `| head`) has exited.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

from gsa_train.process.exit_codes import INTERRUPTED

READER_LEFT = 141
"""Exit code of a shell for a program that SIGPIPE ended."""


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Run a command in this context, including its imports, which may take a second. On Ctrl-C, or if memory is
    exhausted, the command prints a line instead of a traceback. If the process that reads its output has exited, the
    command prints nothing. Training handles signals itself and does not use this context."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as it is if descriptor 1 is closed
                sys.stdout.flush()  # an error at the interpreter's exit could not be caught
    except (KeyboardInterrupt, ImportError) as error:
        # dill, which torch imports, turns Ctrl-C into an error of its own.
        if isinstance(error, ImportError) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
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
        if not _reader_left():  # Another pipe or socket broke.
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        sys.exit(READER_LEFT)


def _out_of_memory(error: Exception) -> bool:
    """Returns True if host or device is out of memory. Does not import torch, which has no exception class for the
    host."""
    is_devices = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_devices or "DefaultCPUAllocator: can't allocate" in str(error)


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))
