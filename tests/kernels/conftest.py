import pytest
import torch
from kernel_devices import CPU, CUDA, GPU

from gsa_kernels.devices import on_hopper


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ask for the device here, because asking during collection would initialise CUDA and prevent forks."""
    if item.get_closest_marker("hopper") and not (CUDA and on_hopper(torch.device("cuda"))):
        pytest.skip("needs a Hopper")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[CPU, GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
