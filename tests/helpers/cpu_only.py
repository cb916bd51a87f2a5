"""Runs on CPUs over gloo, also on a machine with GPUs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def cpu_only() -> Iterator[None]:
    """The runs that a module starts see no GPU. A folder's conftest.py imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
