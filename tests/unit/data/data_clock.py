"""Provides a clock for the time limits of reads. It advances only when an action would hang. Slow machines therefore
never reach a limit, and the tests never wait."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gsa_data import fetch


class Hangs(BaseException):
    """Ends an action that hangs. The code under test sees that the action does not end."""


class Clock:
    def __init__(self) -> None:
        self.now, self._hangs = 0.0, False

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stand_still(self) -> None:
        self._hangs = True
        raise Hangs

    def has_hung(self) -> bool:
        """Return whether an action has hung since the last call."""
        hung, self._hangs = self._hangs, False
        return hung


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Create a clock for the limits of gsa_data.fetch, whose actions then run in the calling thread."""
    clock = Clock()

    class Action:
        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self._target, self._hangs = target, False

        def start(self) -> None:
            self._target()
            self._hangs = clock.has_hung()

        def is_alive(self) -> bool:
            return self._hangs

        def join(self, timeout: float) -> None:
            clock.now += timeout

    class Connected(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait()
            hung = clock.has_hung()
            clock.now += (timeout or 0.0) * hung
            return not hung

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(fetch, "threading", SimpleNamespace(Thread=Action, Event=Connected))
    return clock
