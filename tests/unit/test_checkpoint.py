"""Checkpoint folders: complete or not there, whatever a kill interrupts; and what a resumed optimizer holds."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train import checkpoint
from gsa_train.checkpoint import (
    RunState,
    find_checkpoint,
    load_checkpoint,
    read_run_state,
    recover_folder,
    save_checkpoint,
)
from gsa_train.config import Config
from gsa_train.model.build import Model
from gsa_train.optim import PhaseOptimizer, build_optimizer, set_learning_rate
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model

LR, DECAY = 1e-2, 0.1


@pytest.fixture(scope="module")
def config() -> Config:
    return tiny_config([SPARSE])


@pytest.fixture(scope="module")
def trained(config: Config) -> tuple[Model, PhaseOptimizer]:
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for seed in range(3):
        take_step(model, optimizer, random_batches(config, seed), config, lr=LR)
    return model, optimizer


@pytest.fixture
def save(trained: tuple[Model, PhaseOptimizer], tmp_path: Path) -> Any:
    """Write a checkpoint of the trained model as if it stood at `step`."""

    def save_at(step: int, keep_last: int = 2) -> Path:
        return save_checkpoint(tmp_path, run_state(step), *trained, single_rank(), keep_last)

    return save_at


def run_state(step: int) -> RunState:
    return RunState(
        step=step,
        tokens=64 * step,
        phase_index=0,
        phase_name="sparse",
        phase_start=0,
        data={"consumed_samples": 4 * step},
        wandb_run_id="abc",
        config_yaml="run: {}",
        layout=(1, 1, 1, 1),
        rng=[],
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- folders -----------------------------------------------------------------------------------------------


def test_the_run_state_reads_back_equal(save):
    assert read_run_state(save(7)) == run_state(7)


def test_only_the_newest_checkpoints_are_kept(save, tmp_path):
    for step in (2, 9, 10, 100):
        save(step, keep_last=2)
    assert names_in(tmp_path) == {"step_00000010", "step_00000100", "latest"}
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000100"


def test_a_run_that_went_back_keeps_the_checkpoint_it_just_wrote(save, tmp_path):
    for step in (8, 9):
        save(step)
    save(4, keep_last=1)
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000004"


def test_a_checkpoint_is_found_by_its_own_name_by_its_folder_and_by_its_run(save, tmp_path):
    folder = save(3)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "checkpoints").symlink_to(tmp_path, target_is_directory=True)
    assert find_checkpoint(folder) == find_checkpoint(tmp_path) == folder
    assert find_checkpoint(run_folder) == run_folder / "checkpoints" / folder.name
    assert find_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("lost", ["metadata.json", None], ids=["incomplete", "missing"])
def test_latest_must_name_a_complete_checkpoint(lost, save, tmp_path):
    save(3)
    folder = save(5)
    if lost is None:
        shutil.rmtree(folder)
    else:
        (folder / lost).unlink()
    with pytest.raises(FileNotFoundError, match=r"latest names step_00000005.*: step_00000003\. Write one"):
        find_checkpoint(tmp_path)


def test_another_format_version_is_refused(save, monkeypatch):
    folder = save(1)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    with pytest.raises(ValueError, match="has format version 1, this code reads 2"):
        read_run_state(folder)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code may catch it."""


def kill_before_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die before the given one of the calls that change the folder."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return function(*arguments, **options)

        return call

    for owner, name in ((os, "replace"), (shutil, "rmtree"), (Path, "rename"), (Path, "write_text")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    for name in ("_make_durable", "_publish"):
        monkeypatch.setattr(checkpoint, name, counted(getattr(checkpoint, name)))


@pytest.fixture
def copied_saves(save, tmp_path_factory, monkeypatch):
    """megatron-core's part of a save, made once and then copied, for many fast saves."""
    template = tmp_path_factory.mktemp("template") / "content"
    shutil.copytree(save(1), template)

    def copy(content: Any, folder: str, *arguments: Any, **options: Any) -> None:
        for path in template.iterdir():
            shutil.copy(path, folder)

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", copy)
    monkeypatch.setattr(checkpoint, "_sync", lambda path: None)  # slow, and no power fails here


@pytest.mark.usefixtures("copied_saves")
@pytest.mark.parametrize("again", [False, True], ids=["new step", "step written before"])
def test_a_save_killed_anywhere_leaves_a_checkpoint_to_resume_from(again, save, tmp_path, monkeypatch):
    new = tmp_path / "step_00000004"
    for kills in range(100):
        shutil.rmtree(new, ignore_errors=True)
        save(2)
        if again:
            save(4)
        old = find_checkpoint(tmp_path)
        with monkeypatch.context() as patch:
            kill_before_call(patch, kills + 1)
            try:
                save(4, keep_last=1)
            except Killed:
                pass
            else:
                break
        recover_folder(tmp_path)
        assert find_checkpoint(tmp_path) in (old, new)
        assert not [name for name in names_in(tmp_path) if name.startswith((".tmp_step", ".replaced"))]
    assert kills >= 6
    assert find_checkpoint(tmp_path) == new
    assert names_in(tmp_path) == {new.name, "latest"}


# --- the optimizer after a resume ----------------------------------------------------------------------------


def adam_of(
    model: Model, phase_optimizer: PhaseOptimizer
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Parameter name -> its group's settings, its Adam state."""
    found = {}
    for inner in phase_optimizer.optimizer.chained_optimizers:
        for name, parameter in model.gpt.named_parameters():
            group_index, order = inner.model_param_group_index_map[parameter]
            group = inner.optimizer.param_groups[group_index]
            found[name] = (group, inner.optimizer.state[group["params"][order]])
    return found


def test_after_a_resume_each_parameter_has_its_own_rate_moments_and_step_count(trained, save, config):
    folder = save(3)
    other = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=99))
    model = tiny_model(other)
    resumed = build_optimizer(model, SPARSE, other)
    load_checkpoint(folder, model, resumed, single_rank(), with_optimizer=True)
    set_learning_rate(resumed.optimizer, LR, DECAY)

    before, after = adam_of(*trained), adam_of(model, resumed)
    assert after.keys() == before.keys() == dict(model.gpt.named_parameters()).keys()
    parameters = dict(model.gpt.named_parameters())
    for name, (group, state) in after.items():
        assert group["lr"] == pytest.approx(10 * LR if ".indexer." in name else LR), name
        assert group["weight_decay"] == (DECAY if parameters[name].dim() > 1 else 0), name
        assert state["step"].item() == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment], before[name][1][moment]), (name, moment)
        assert state["exp_avg_sq"].any(), name  # nothing was compared with zeros
    counts = [state["step"].data_ptr() for _, state in after.values()]
    assert len(set(counts)) == len(counts)  # a shared count would rise once per parameter
