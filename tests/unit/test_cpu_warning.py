"""A model for GPUs that is started on CPUs is warned of, with its time and the remedy."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsa_train.config import load_config
from gsa_train.model.flops import flops_per_token
from gsa_train.run.cpu_warning import FLOPS_PER_CORE, cores_of_the_job, cpu_warning
from gsa_train.train import warn_of_cpus

LARGE = load_config("gsa_1.7b")


def test_the_estimate_and_the_remedy() -> None:
    said = cpu_warning(LARGE, cores=64)
    assert said is not None
    phase = LARGE.phases[-1]
    per_token = flops_per_token(LARGE.model, LARGE.gsa, LARGE.moe, phase, LARGE.train.seq_len_tokens).total
    flops = per_token * LARGE.train.global_batch_size * LARGE.train.seq_len_tokens
    hours = int(flops / (64 * FLOPS_PER_CORE) / 3600)
    assert f"a step of phase {phase.name} takes about {hours}h" in said
    assert "Start it on a machine with GPUs" in said
    assert "--config demo" in said


def test_what_is_made_for_cpus_is_not_warned_of() -> None:
    assert cpu_warning(load_config("demo"), cores=1) is None


@pytest.mark.parametrize(
    ("world_size", "local", "threads", "cores"),
    [(1, None, 4, 4), (1, None, 99, 8), (2, "2", 1, 2), (16, "4", 1, 16), (16, "4", 99, 32)],
)
def test_the_cores_are_those_that_the_ranks_use(monkeypatch, world_size, local, threads, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert cores_of_the_job(world_size, threads) == cores


@pytest.mark.parametrize(("rank", "device", "warnings"), [(0, "cpu", 1), (1, "cpu", 0), (0, "cuda", 0)])
def test_rank_0_warns_on_cpus(caplog, rank, device, warnings):
    parallel: Any = SimpleNamespace(is_main=rank == 0, device=torch.device(device), world_size=1)
    with caplog.at_level(logging.WARNING):
        warn_of_cpus(LARGE, parallel)
    assert len(caplog.records) == warnings
