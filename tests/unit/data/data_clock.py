"""Provides a clock for the time limits of reads. The clock advances only in a sleep, or when an action would hang.
Therefore slow machines never reach a limit, and the tests never wait."""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

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

    def in_background(action: Callable[[], Any]) -> Future[Any]:
        outcome: Future[Any] = Future()
        fetch._settle(outcome, action)
        return Future() if isinstance(outcome.exception(), Hangs) else outcome

    def wait(outcomes: Sequence[Future[Any]], timeout: float) -> SimpleNamespace:
        hung = clock.has_hung()
        if not hung:
            futures.wait(outcomes)
            hung = clock.has_hung()
        clock.now += timeout * hung
        return SimpleNamespace(done=not hung)

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(fetch, "in_background", in_background)
    monkeypatch.setattr(fetch, "wait", wait)
    return clock
