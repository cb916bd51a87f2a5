"""Tests that a phase's fp32 weights in bf16 training continue in the next phase, in process or by a checkpoint.
tests/distributed/test_many_layouts.py uses several ranks."""

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import gsa_train.train
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import MAIN_WEIGHT
from gsa_train.optimizer.main_weights import MainWeights, carry_over, keep_main_weights
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.phases import PhaseRange, phase_ranges
from gsa_train.reliability.monitor.monitor import SpikeFound
from gsa_train.run.open import open_phase
from gsa_train.run.state import Run
from gsa_train.run_folder.resume import Start
from gsa_train.train import train_phases
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model
from helpers.tiny_run import tiny_run

FIRST = dataclasses.replace(SPARSE, name="first", steps=3, lr=1e-4, min_lr=1e-4)
BASE = dataclasses.replace(FIRST, name="base", train="base")
"""Does not train everything that the first phase does."""
ZERO = {"strategy": "deepspeed"}
KINDS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "replicated": {"distributed_optimizer": False},
    "ZeRO-1": {**ZERO, "zero_stage": 1},
    "ZeRO-3": {**ZERO, "zero_stage": 3},
    "in host memory": {**ZERO, "zero_stage": 2, "offload_optimizer": True},
}


@pytest.fixture(autouse=True)
def no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow garbage collection of a run's objects, because other tests share the process."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


def main_weights(model: Model, optimizer: PhaseOptimizer) -> dict[str, torch.Tensor]:
    """Map each parameter to its flat fp32 weight; one rank has all of each."""
    names = {id(parameter): name for name, parameter in model.gpt.named_parameters()}
    return {names[id(part.parameter)]: part.tensors[MAIN_WEIGHT].clone() for part in optimizer.state_parts()}


@pytest.mark.parametrize("kind", KINDS)
def test_they_go_on_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    config = tiny_config([FIRST, BASE], train={"precision": "bf16"}, parallel=KINDS[kind])
    model = tiny_model(config)
    first = build_optimizer(model, FIRST, config)
    for seed in range(3):
        take_step(model, first, random_batches(config, seed), config, lr=1e-4)
    folder = write_checkpoint(tmp_path, 3, model, first, config)
    before = main_weights(model, first)
    assert sum(not torch.equal(weight, weight.bfloat16().float()) for weight in before.values()) > 10
    kept = keep_main_weights(model, first)
    close_optimizer(model, first)
    second = build_optimizer(model, BASE, config)
    carry_over(kept, second)

    loaded = tiny_model(config)
    resumed = build_optimizer(loaded, BASE, config)
    load_checkpoint(folder, loaded, resumed, single_rank(), with_optimizer=False)
    for each, optimizer in ((model, second), (loaded, resumed)):
        after = main_weights(each, optimizer)
        assert after.keys() == {name for name in before if "indexer" not in name}
        for name, weight in after.items():
            assert torch.equal(weight, before[name]), name
        assert all(not part.tensors["exp_avg"].any() for part in optimizer.state_parts())
        assert optimizer.updates == 0
        close_optimizer(each, optimizer)


def test_they_take_no_memory_once_the_next_phase_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[MainWeights]] = []
    alive: list[list[bool]] = []

    def keep(model: Model, optimizer: PhaseOptimizer, whole_state: bool) -> MainWeights:
        weights = keep_main_weights(model, optimizer, whole_state)
        kept.append(weakref.ref(weights))
        return weights

    def run_phase(run: Run, phase_range: PhaseRange, optimizer: PhaseOptimizer) -> SpikeFound | None:
        alive.append([each() is not None for each in kept])
        return SpikeFound(6, 6, "loss", 9.0, 5.0, 1) if phase_range.index == 2 else None

    monkeypatch.setattr(gsa_train.train, "keep_main_weights", keep)
    monkeypatch.setattr(gsa_train.train, "run_phase", run_phase)
    phases = [dataclasses.replace(FIRST, name=name) for name in ("first", "second", "third", "fourth")]
    config = tiny_config(phases, train={"precision": "bf16"})
    run, ranges = tiny_run(config, tiny_model(config)), phase_ranges(phases)
    run.phase_optimizer = open_phase(config, run.model, Start(), ranges[0], single_rank(), RunClock())
    assert train_phases(run, ranges) is not None
    assert alive == [[], [False], [False, False]]
    assert len(kept) == 2  # none where a rewind starts again
