"""Decides which cases only nightly tests run, which of them this session runs, and which need several GPUs."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
import torch


def with_nightly(names: Iterable[str], nightly: Collection[str]) -> list[Any]:
    """Return all names for `parametrize`, with the names in `nightly` marked."""
    names = list(names)
    assert not set(nightly) - set(names), f"no such cases: {sorted(set(nightly) - set(names))}"
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


def cases_of(table: Mapping[str, Any]) -> list[Any]:
    """Return all names of a table for `parametrize`, with the names of its nightly cases marked."""
    return with_nightly(table, {name for name, case in table.items() if case.nightly})


def runs_nightly(request: pytest.FixtureRequest) -> bool:
    """Return whether this session runs nightly tests of the fixture's module."""
    items = request.session.items
    return any(item.path == request.path and item.get_closest_marker("nightly") for item in items)


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """Return each `name` for which this session runs `test`, so that a fixture creates only these cases."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
    ]


def needs_devices(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")
