"""Provides a clock for the limits of reads that advances only when an action says that it blocks. Slow machines
therefore never reach a limit, and the tests never wait for something that hangs."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gsa_data import fetch

LONGEST_WAIT_SECONDS = 300.0
"""Limit for an action that neither ends nor says that it blocks."""


class Over(Exception):
    """Ends a blocked action together with its test, because it would otherwise continue in the next test."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.standstills: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.test_is_over = threading.Event()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stand_still(self, seconds: float = float("inf")) -> None:
        """Block an action, or a thread that connects, forever unless `seconds` are given."""
        thread = threading.current_thread()
        if isinstance(thread, Action):
            thread.stand_still(seconds)
            return
        self.standstills.put(None)
        self.test_is_over.wait()
        raise Over


class Action(threading.Thread):
    """Runs one action of `in_time`, which waits for it by this clock."""

    clock: Clock

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._pauses: queue.Queue[float] = queue.Queue()
        """Seconds of each block; 0 at its end."""
        self._left_seconds = 0.0
        self._goes_on = threading.Semaphore(0)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._pauses.put(0.0)

    def stand_still(self, seconds: float) -> None:
        """Block the action until the clock has advanced by this time. An abandoned action ends with the test."""
        self._pauses.put(seconds)
        while not self._goes_on.acquire(timeout=0.01):
            if self.clock.test_is_over.is_set():
                raise Over

    def join(self, timeout: float | None = None) -> None:
        """Wait until the action ends, or until its blocks have taken `timeout`."""
        assert timeout is not None
        if not self._left_seconds:
            self._left_seconds = self._pauses.get(timeout=LONGEST_WAIT_SECONDS)
        if not self._left_seconds:
            super().join(LONGEST_WAIT_SECONDS)
            return
        passed = min(timeout, self._left_seconds)
        self.clock.now += passed
        self._left_seconds -= passed
        if not self._left_seconds:
            self._goes_on.release()


class Connected(threading.Event):
    clock: Clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        while not super().wait(0.01):
            with contextlib.suppress(queue.Empty):
                self.clock.standstills.get_nowait()
                self.clock.now += timeout
                return False
        return True


@contextlib.contextmanager
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Create a clock for the limits of gsa_data.fetch; blocked actions end with the context."""
    clock = Clock()
    own = {"Thread": type("OwnAction", (Action,), {"clock": clock})}
    own["Event"] = type("OwnConnected", (Connected,), {"clock": clock})
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(fetch, "threading", SimpleNamespace(**own))
    try:
        yield clock
    finally:
        clock.test_is_over.set()
