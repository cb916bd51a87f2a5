"""Tests checkpoint saving on CUDA devices. The state is copied while the next step runs. The device delays this step's
weight update until the copies are complete, but the host does not wait. In another test, one of two ranks cannot report
how its save ended."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gsa_train.checkpoint.finite import _all_finite
from gsa_train.checkpoint.host_memory import HostMemory
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.checkpoint.staging import Group, begin_copies
from gsa_train.config import CheckpointConfig
from gsa_train.optimizer.mcore import build_optimizer
from helpers.checkpoints import run_state
from helpers.runs import OF_A_GPU, SMALL, numbers_of, start
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model
from helpers.tiers import needs_devices

SLEEP_CYCLES = 8 * 10**9
"""About five seconds of a device, enough for a busy host to reach its next line."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 70_001])
def test_what_is_not_finite_is_seen_among_the_largest_values(dtype: torch.dtype, size: int) -> None:
    largest = torch.full((size,), torch.finfo(dtype).max, dtype=dtype, device="cuda")
    both = [largest, -largest, torch.ones(2, device="cuda"), torch.zeros(0, device="cuda")]
    assert _all_finite(both)
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong = largest.clone()
        wrong[size // 2] = value
        assert not _all_finite([*both, wrong])


def test_an_update_is_held_on_the_device_and_the_host_goes_on() -> None:
    tensors = [torch.rand(1 << 22, device="cuda") for _ in range(8)]
    expected = [tensor.cpu() for tensor in tensors]
    torch.empty_like(tensors[0]).fill_(7.0)  # loads its kernel, for which the host would wait
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # simulates work of the previous step; the copies come after it
    group: Group = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    copies = begin_copies([group], HostMemory(), ThreadPoolExecutor(1))
    assert not copies._filled.query()
    copies.hold_update()
    for tensor in tensors:
        tensor.fill_(7.0)
    assert not copies._filled.query()  # the host has not waited
    copies.wait()
    for (_, copy), before in zip(group, expected, strict=True):
        assert copy.is_pinned()
        assert torch.equal(copy, before)
    torch.cuda.synchronize()
    assert all((tensor == 7.0).all() for tensor in tensors)
    assert copies.held_seconds() >= 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_checkpoint_holds_the_moment_of_its_beginning(tmp_path: Path, waits: bool) -> None:
    config = tiny_config([SPARSE])
    model, other = tiny_model(config), tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    take_step(model, optimizer, random_batches(config, 0), config, lr=1e-2)
    saver = CheckpointSaver(tmp_path, CheckpointConfig(async_save=not waits), single_rank())
    saver.reserve(model, optimizer)
    torch.cuda._sleep(SLEEP_CYCLES)
    found = saver.begin(run_state(1), model, optimizer)
    before = [parameter.detach().clone() for parameter in model.gpt.parameters()]
    moments = [tensor.clone() for part in optimizer.state_parts() for tensor in part.tensors.values()]
    for seed in range(1, 4):
        take_step(
            model, optimizer, random_batches(config, seed), config, lr=1e-2, hold_update=saver.hold_update
        )
    (result,) = found + saver.ended(now=4, wait=True)
    assert result.error is None
    saver.close()
    again = build_optimizer(other, SPARSE, config)
    load_checkpoint(result.folder, other, again, single_rank(), with_optimizer=True)
    assert all(map(torch.equal, before, other.gpt.parameters()))
    state = [tensor for part in again.state_parts() for tensor in part.tensors.values()]
    assert all(map(torch.equal, moments, state))


@needs_devices(2)
def test_a_rank_that_cannot_tell_the_others_ends_the_run_and_the_same_command_goes_on(tmp_path):
    undisturbed = start(tmp_path / "undisturbed", *SMALL, ranks=2, real=True).wait()
    run = start(tmp_path, *SMALL, ranks=2, real=True, faults={"lost_saves": [1, [1]]}).wait(expected=1)
    assert "SaveLost: rank 1: how the save of step 10 ended could not be agreed on by all ranks" in run.output
    assert 10 <= run.steps()[-1]["step"] < 15
    assert run.latest == "step_00000005"
    resumed = start(tmp_path, *SMALL, ranks=2, real=True).wait()
    assert f"resuming from {run.checkpoints}/step_00000005" in resumed.output
    assert numbers_of(resumed.records(), keys=OF_A_GPU) == numbers_of(undisturbed.records(), keys=OF_A_GPU)
