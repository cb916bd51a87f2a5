"""Which cases of a table the nightly tests alone have, and which of them this session runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_nightly(names: Iterable[str], nightly: Collection[str]) -> list[Any]:
    """For `parametrize`: all names, those in `nightly` marked as such."""
    names = list(names)
    assert not set(nightly) - set(names), f"no such cases: {sorted(set(nightly) - set(names))}"
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


def runs_nightly(request: pytest.FixtureRequest) -> bool:
    """Whether this session runs nightly tests of the fixture's module."""
    items = request.session.items
    return any(item.path == request.path and item.get_closest_marker("nightly") for item in items)


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The `name`s with which this session runs a test of the fixture's module, so that the fixture makes no others."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
    ]
