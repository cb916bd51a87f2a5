"""Tests the account of time on a CUDA device, for which the host does not wait, and compilation within a step."""

import statistics
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.reliability.hang_limit import watch_compilation
from helpers.runs import SMALL, train


@triton.jit
def fill(out, value: tl.constexpr):
    tl.store(out + tl.program_id(0), value)


def test_triton_tells_when_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    told: list[bool] = []
    watch_compilation(told.append)
    out = torch.zeros(4, device="cuda")
    fill[(4,)](out, 7)
    fill[(4,)](out, 7)
    assert told == [True, False]  # the second launch compiles nothing
    fill[(4,)](out, 9)
    assert told == [True, False, True, False]
    assert out.tolist() == [9.0] * 4


def test_the_account_of_a_run_on_a_gpu(tmp_path: Path) -> None:
    """The run logs one step in five, and the device may lag the host at the borders of a phase."""
    run = train(tmp_path, *SMALL, "logging.every_steps=5", "train.micro_batch_size=4", real=True)
    account = read_account(run.folder)
    assert account is not None
    lost = account.lost_seconds
    assert account.productive_seconds + sum(lost.values()) == pytest.approx(account.wall_seconds)
    assert min(lost.values()) > -0.1
    assert 0 < lost["other"] < 0.1 * account.wall_seconds
    assert lost["import"] > 1
    assert lost["first_step"] > account.step_seconds > 0  # this compiles
    assert lost["repeated"] == lost["detection"] == lost["down"] == 0
    steps = {record["step"]: record["step_seconds"] for record in run.steps()}
    usual = statistics.median(steps[step] for step in (5, 10, 15, 20))
    assert account.productive_seconds < 3 * 20 * usual
