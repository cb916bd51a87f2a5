"""Replacing torch's functions leaves the rest of torch, and transformers, as they are."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gsa_train.config import ParallelConfig
from gsa_train.parallel import collective_timeout
from helpers.single_rank import single_rank

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import torch
from gsa_train import cpu_backend

cpu_backend.install()
with torch.device("meta"):
    made = [torch.arange(3), torch.empty(2), torch.full((2,), 1.0), torch.ones(2), torch.rand(2), torch.randn(2),
            torch.tensor([1.0]), torch.zeros(2)]
assert {tensor.device.type for tensor in made} == {"meta"}, made
assert torch.ones(2, device="cuda").device.type == "cpu"
"""


def test_a_device_context_reaches_what_is_replaced() -> None:
    """In a process that has had no such context before, where torch would first meet the replacements."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], cwd=ROOT, check=True)


def test_groups_share_the_network_device_of_the_first_and_keep_their_timeouts() -> None:
    of_world = single_rank().groups.tp
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    options = [group._get_backend(torch.device("cpu")).options for group in (dist.group.WORLD, of_world, own)]
    assert [each._devices for each in options] == 3 * [options[0]._devices]
    of_layout = collective_timeout(ParallelConfig())
    assert [each._timeout for each in options] == [of_layout, of_layout, timedelta(seconds=77)]
    dist.destroy_process_group(own)
