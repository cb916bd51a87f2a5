"""Tests that replacing torch's functions does not change the rest of torch and transformers."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gsa_train.config import ParallelConfig
from gsa_train.distributed.parallel import collective_timeout
from helpers.runs import run_script
from helpers.single_rank import single_rank

pytest.importorskip("transformers")

ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}
CODE = """
import torch
from torch.utils._device import _device_constructors
from gsa_train.distributed import cpu_backend

assert not _device_constructors.cache_info().currsize, "there was a context before"
cpu_backend.install()
with torch.device("meta"):
    made = [torch.arange(3), torch.empty(2), torch.full((2,), 1.0), torch.ones(2), torch.rand(2), torch.randn(2),
            torch.tensor([1.0]), torch.zeros(2)]
assert {tensor.device.type for tensor in made} == {"meta"}, made
assert torch.ones(2, device="cuda").device.type == "cpu"
"""


def test_a_device_context_reaches_what_is_replaced(tmp_path: Path) -> None:
    """The process has had no such context before, so torch first meets the replacements here."""
    (tmp_path / "code.py").write_text(CODE)
    run_script([str(tmp_path / "code.py")], tmp_path / "log", ranks=1, launcher="python", environment=ON_CPUS)


def test_groups_share_the_network_device_of_the_first_and_keep_their_timeouts() -> None:
    of_world = single_rank().groups.tp
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    options = [group._get_backend(torch.device("cpu")).options for group in (dist.group.WORLD, of_world, own)]
    assert [each._devices for each in options] == 3 * [options[0]._devices]
    of_layout = collective_timeout(ParallelConfig())
    assert [each._timeout for each in options] == [of_layout, of_layout, timedelta(seconds=77)]
    dist.destroy_process_group(own)
