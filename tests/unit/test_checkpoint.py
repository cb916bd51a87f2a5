"""Tests that checkpoint folders are complete or absent, whatever a kill interrupts, and tests damaged files."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.checkpoint import files as checkpoint_files
from gsa_train.checkpoint import load as checkpoint
from gsa_train.checkpoint.files import find_checkpoint, recover_folder, resume_candidates
from gsa_train.checkpoint.load import read_run_state
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer
from gsa_train.run_folder.resume import Start
from helpers import saving
from helpers.checkpoints import run_state
from helpers.saving import is_intact, names_in
from helpers.single_rank import single_rank

# pytest finds the fixtures here.
config, trained, make_saver = saving.config, saving.trained, saving.make_saver


@pytest.fixture
def save(trained: tuple[Model, PhaseOptimizer], make_saver: Any, tmp_path: Path) -> Any:
    """Write a checkpoint of the trained model as if it were at `step`."""

    def save_at(step: int, **fields: Any) -> Path:
        saver = make_saver(**{"keep_last": 2, **fields})
        (result,) = saver.begin(run_state(step), *trained) + saver.ended(now=step, wait=True)
        assert result.error is None, result.error
        assert result.folder == tmp_path / f"step_{step:08d}"
        return result.folder

    return save_at


# --- folders -----------------------------------------------------------------------------------------------


def test_generators_of_a_cpu_do_not_load_on_a_gpu(monkeypatch, caplog):
    """A run that began on a CPU continues on a GPU, whose generator does not accept this state."""
    parallel = single_rank()
    saved = dataclasses.replace(run_state(3), layout=parallel.layout, rng=[checkpoint.local_rng()])
    start = Start(state=saved)
    expected = torch.rand(2)
    start.restore_rng(parallel)
    assert torch.equal(torch.rand(2), expected)
    assert not caplog.records

    def set_state(state: torch.Tensor) -> None:  # like torch's, of a seed and an offset
        assert len(state) == 16, "RNG state is wrong size"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    start.restore_rng(parallel)
    assert "of another kind of device: random-number generators start from run.seed" in caplog.text


KEPT = [
    ((2, 9, 10, 100), {"keep_last": 2}, (10, 100)),
    ((4, 6, 8, 9, 10, 12, 13), {"every_steps": 2, "keep_last": 2, "keep_every_steps": 4}, (4, 8, 12, 13)),
]


@pytest.mark.parametrize(("steps", "fields", "kept"), KEPT, ids=["the newest", "and milestones"])
def test_which_checkpoints_are_kept(save, tmp_path, steps, fields, kept):
    for step in steps:
        save(step, **fields)
    assert names_in(tmp_path) == {"latest", *(f"step_{step:08d}" for step in kept)}
    assert find_checkpoint(tmp_path) == tmp_path / f"step_{kept[-1]:08d}"


def test_of_a_checkpoint_that_was_moved_the_link_goes(save, tmp_path):
    """The checkpoint is on another disk, with a link in its place."""
    save(1)
    moved = (tmp_path / "step_00000001").rename(tmp_path / "moved")
    (tmp_path / "step_00000001").symlink_to(moved)
    save(2)
    assert checkpoint_files.prune(tmp_path, 1, tmp_path / "step_00000002") == []
    assert names_in(tmp_path) == {"latest", "moved", "step_00000002"}
    assert is_intact(moved)


def test_a_run_that_went_back_keeps_the_checkpoint_it_just_wrote(save, tmp_path):
    for step in (8, 9):
        save(step)
    save(4, keep_last=1)
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000004"
    save(5, keep_last=2)
    assert resume_candidates(tmp_path) == [tmp_path / "step_00000005", tmp_path / "step_00000004"]


@pytest.mark.parametrize("lost", ["metadata.json", None], ids=["incomplete", "missing"])
def test_latest_must_name_a_complete_checkpoint(lost, save, tmp_path):
    save(3)
    folder = save(5)
    if lost is None:
        shutil.rmtree(folder)
    else:
        (folder / lost).unlink()
    with pytest.raises(FileNotFoundError, match=r"latest names step_00000005.*: step_00000003\. Give one"):
        find_checkpoint(tmp_path)


def test_another_format_version_is_refused(save, monkeypatch):
    folder = save(1)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 7)
    with pytest.raises(ValueError, match="has format version 4, this code reads 7"):
        read_run_state(folder)


class Killed(BaseException):
    """Simulates SIGKILL: no code may catch it."""


def kill_before_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die before the given call that changes the folder."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return function(*arguments, **options)

        return call

    changes = ((os, "replace"), (shutil, "rmtree"), (Path, "rename"), (Path, "mkdir"), (Path, "open"))
    for owner, name in changes:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def write_files(checkpoints: Path, step: int, keep_last: int = 2) -> None:
    """Change the folder as a save does, with small files."""
    final = checkpoint_files.step_folder(checkpoints, step)
    unfinished = final.with_name(f".tmp_{final.name}")
    unfinished.mkdir()
    names = ("__0_0.distcp", "common.pt", "metadata.json")
    files = {name: checkpoint_files.write_recorded(unfinished / name, name.encode()) for name in names}
    checkpoint_files.write_manifest(unfinished, checkpoint_files.Manifest("run", "", 8, files))
    checkpoint_files.publish(unfinished, final)
    assert checkpoint_files.prune(checkpoints, keep_last, newest=final) == []


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step written before"])
def test_a_save_killed_anywhere_leaves_a_checkpoint_to_resume_from(again, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "sync", lambda path: None)  # slow, and no power fails here
    new = tmp_path / "step_00000004"
    for kills in range(100):
        shutil.rmtree(new, ignore_errors=True)
        write_files(tmp_path, 2)
        if again:
            write_files(tmp_path, 4)
        old = find_checkpoint(tmp_path)
        with monkeypatch.context() as patch:
            kill_before_call(patch, kills + 1)
            try:
                write_files(tmp_path, 4, keep_last=1)
            except Killed:
                pass
            else:
                break
        recover_folder(tmp_path)
        assert find_checkpoint(tmp_path) in (old, new)
        assert all(is_intact(path) for path in resume_candidates(tmp_path))
        assert not [name for name in names_in(tmp_path) if name.startswith((".tmp_step", ".replaced"))]
    assert kills >= 10
    assert find_checkpoint(tmp_path) == new
    assert names_in(tmp_path) == {new.name, "latest"}


def test_a_damaged_checkpoint_gets_a_name_that_is_free(tmp_path):
    for name in ("step_00000002", "step_00000003", "step_00000003.damaged"):
        (tmp_path / name).mkdir()
    (renamed,) = checkpoint_files.pass_over([tmp_path / "step_00000003"], tmp_path / "step_00000002")
    assert renamed.name == "step_00000003.damaged.2"
    assert (tmp_path / "latest").read_text() == "step_00000002"


def test_ranks_share_files_and_bytes_about_evenly():
    files = {f"{n:02d}": checkpoint_files.FileRecord(bytes=n * n, crc32="") for n in range(20)}
    shares = [checkpoint_files.share_of(files, index, 3) for index in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(record.bytes for record in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 50
