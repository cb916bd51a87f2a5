"""Makes runs use CPUs over gloo, also on a machine with GPUs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def cpu_only() -> Iterator[None]:
    """Hide the GPUs from a module's runs. A folder's conftest.py imports this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
