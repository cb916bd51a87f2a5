import pytest
import torch
from kernel_devices import CPU, GPU


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[CPU, GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
