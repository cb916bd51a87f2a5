"""A limit of CPU time for code of others that may never end, such as a chat template with nested loops."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OverLimit(BaseException):
    """The block used up its time. No Exception, so that the code inside the block cannot catch it by accident."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends the block with OverLimit after so much CPU time of this thread.

    CPU time does not depend on what else the machine does. A single call of C code is not cut short.
    """
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds
    done, turn = threading.Event(), threading.Lock()

    def watch() -> None:
        left = seconds
        while not done.wait(left):  # as CPU time takes at least as long
            left = end - time.clock_gettime(clock)
            if left <= 0:
                with turn:
                    if not done.is_set():
                        _raise_in(thread, OverLimit)
                return

    watcher = threading.Thread(target=watch, name="gsa_data cpu limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with turn:
            done.set()
        watcher.join()
        _raise_in(thread, None)  # where the block ended by itself just before


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error else None
    )
