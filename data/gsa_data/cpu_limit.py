"""Limit the CPU time of untrusted code that may never end, such as a chat template with nested loops."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.5


class OverLimit(BaseException):
    """Raised inside a `with` block that has used up its CPU time. It is a BaseException, so that handlers of Exception
    in the block do not catch it."""


class CpuLimit:
    """Ends `with` blocks that take too much CPU time, whatever the load of the machine.

    One thread checks all blocks every POLL_SECONDS, so the limit costs only microseconds per block. A long call into C
    code is not interrupted: the block ends after the call. The object can be pickled and forked.
    """

    def __init__(self) -> None:
        self._begin()

    def __reduce__(self) -> tuple[type[CpuLimit], tuple[()]]:
        return CpuLimit, ()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._end_of: dict[int, tuple[int, float]] = {}  # thread -> its CPU clock, and its deadline
        self._is_watched = False

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End the block with OverLimit after this CPU time of this thread."""
        if self._process != os.getpid():  # a fork has no threads, and may have copied a held lock
            self._begin()
        thread = threading.get_ident()
        with self._turn:
            self._end_of[thread] = (time.pthread_getcpuclockid(thread), time.thread_time() + seconds)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="gsa_data cpu limit", daemon=True).start()
        try:
            yield
        finally:
            with self._turn:
                is_over = self._end_of.pop(thread, None) is None
            if is_over:
                _raise_in(thread, None)  # cancels an error that came just after the block's end

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self._turn:
                if not self._end_of:
                    self._is_watched = False
                    return
                over = [
                    thread for thread, (clock, end) in self._end_of.items() if time.clock_gettime(clock) > end
                ]
                for thread in over:
                    del self._end_of[thread]
                    _raise_in(thread, OverLimit)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread. None cancels a pending error."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error else None
    )
