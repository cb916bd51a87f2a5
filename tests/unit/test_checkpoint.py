"""Checkpoint folders: complete or not there, whatever a kill interrupts; saves that fail and files that are damaged;
and what a resumed optimizer holds."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train import checkpoint, checkpoint_files
from gsa_train.checkpoint import find_damage, load_checkpoint, read_run_state
from gsa_train.checkpoint_files import (
    complete_checkpoints,
    find_checkpoint,
    pass_over,
    recover_folder,
    resume_candidates,
)
from gsa_train.checkpoint_save import CheckpointError, CheckpointSaver, SaveResult
from gsa_train.config import CheckpointConfig, Config
from gsa_train.model.build import Model
from gsa_train.optim import PhaseOptimizer, build_optimizer, set_learning_rate
from helpers.checkpoints import run_state, write_checkpoint
from helpers.single_rank import (
    SPARSE,
    random_batches,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)

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
def make_saver(tmp_path: Path) -> Iterator[Any]:
    savers = []

    def make(**fields: Any) -> CheckpointSaver:
        savers.append(CheckpointSaver(tmp_path, CheckpointConfig(**fields), single_rank()))
        return savers[-1]

    yield make
    for saver in savers:
        saver.close()


@pytest.fixture
def save(trained: tuple[Model, PhaseOptimizer], make_saver: Any, tmp_path: Path) -> Any:
    """Write a checkpoint of the trained model as if it stood at `step`."""

    def save_at(step: int, keep_last: int = 2) -> Path:
        saver = make_saver(keep_last=keep_last)
        (result,) = saver.begin(run_state(step), *trained) + saver.ended(now=step, wait=True)
        assert result.error is None, result.error
        assert result.folder == tmp_path / f"step_{step:08d}"
        return result.folder

    return save_at


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
    with pytest.raises(FileNotFoundError, match=r"latest names step_00000005.*: step_00000003\. Give one"):
        find_checkpoint(tmp_path)


def test_another_format_version_is_refused(save, monkeypatch):
    folder = save(1)
    monkeypatch.setattr(checkpoint, "READABLE_VERSIONS", (7,))
    with pytest.raises(ValueError, match="has format version 2, this code reads 7"):
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

    for owner, name in (
        (os, "replace"),
        (shutil, "rmtree"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "open"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def write_files(checkpoints: Path, step: int, keep_last: int = 2) -> None:
    """What a save does to the folder, with small files."""
    final = checkpoint_files.step_folder(checkpoints, step)
    unfinished = final.with_name(f".tmp_{final.name}")
    unfinished.mkdir()
    names = ("__0_0.distcp", "common.pt", "metadata.json")
    files = {name: checkpoint_files.write_durably(unfinished / name, name.encode()) for name in names}
    checkpoint_files.write_manifest(unfinished, files)
    checkpoint_files.publish(unfinished, final)
    assert checkpoint_files.prune(checkpoints, keep_last, newest=final) == []


def is_intact(folder: Path) -> bool:
    return not checkpoint_files.faults_in(folder, checkpoint_files.read_manifest(folder), checksums=True)


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


# --- in the background -------------------------------------------------------------------------------------


@contextmanager
def held_back(saver: CheckpointSaver) -> Iterator[threading.Event]:
    """The saver's thread has something else to do until the event is set."""
    go_on = threading.Event()
    saver._thread.submit(go_on.wait)
    try:
        yield go_on
    finally:
        go_on.set()


def test_a_checkpoint_holds_the_moment_of_its_beginning_whatever_is_trained_meanwhile(make_saver, config):
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    take_step(model, optimizer, random_batches(config, 0), config, lr=LR)
    saver = make_saver()
    with held_back(saver):
        assert saver.begin(run_state(1), model, optimizer) == []
        before = {name: value.clone() for name, value in model.gpt.state_dict().items() if value is not None}
        moments = {name: state["exp_avg"].clone() for name, (_, state) in adam_of(model, optimizer).items()}
        take_step(model, optimizer, random_batches(config, 1), config, lr=LR)
        assert saver.ended(now=2) == []
        assert saver.has(1)
        assert saver.durable_step is None
    (result,) = saver.ended(now=2, wait=True)
    assert saver.durable_step == 1

    load_checkpoint(result.folder, model, optimizer, single_rank(), with_optimizer=True)
    for name, value in before.items():
        assert torch.equal(model.gpt.state_dict()[name], value), name
    for name, (_, state) in adam_of(model, optimizer).items():
        assert torch.equal(state["exp_avg"], moments[name]), name
        assert state["step"].item() == 1


def test_the_next_save_waits_for_the_one_under_way(make_saver, trained, tmp_path):
    saver = make_saver()
    with held_back(saver) as go_on:
        saver.begin(run_state(1), *trained)
        assert saver._save is not None
        stall_so_far = saver._save.stall_seconds
        threading.Timer(0.1, go_on.set).start()
        (first,) = saver.begin(run_state(2), *trained)
    (second,) = saver.ended(now=2, wait=True)
    assert [first.step, second.step] == [1, 2]
    assert first.stall_seconds > stall_so_far
    assert names_in(tmp_path) == {"step_00000001", "step_00000002", "latest"}


def test_the_end_of_a_run_lets_the_save_under_way_end(make_saver, trained, tmp_path):
    saver = make_saver()
    with held_back(saver) as go_on:
        saver.begin(run_state(1), *trained)
        threading.Timer(0.1, go_on.set).start()
        saver.close()  # without a word to other ranks: as when an exception ends this one
    assert is_intact(tmp_path / "step_00000001")


def test_without_async_save_a_checkpoint_is_durable_when_training_goes_on(make_saver, trained):
    saver = make_saver(async_save=False)
    (result,) = saver.begin(run_state(1), *trained)
    assert saver.durable_step == result.step == 1
    assert saver.ended(now=1, wait=True) == []


# --- saves that fail ---------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond that: "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failed(saver: CheckpointSaver, step: int, trained: tuple[Model, PhaseOptimizer]) -> SaveResult:
    (result,) = saver.begin(run_state(step), *trained) + saver.ended(now=step, wait=True)
    assert result.error is not None
    return result


def test_a_failed_save_leaves_nothing_is_tried_again_and_in_the_end_stops_the_run(
    make_saver, trained, tmp_path
):
    saver = make_saver(every_steps=100, save_retries=2, retry_after_steps=3)
    (good,) = saver.begin(run_state(5), *trained) + saver.ended(now=5, wait=True)
    largest = max(path.stat().st_size for path in good.folder.iterdir())
    for step, next_step in ((10, 13), (13, 19)):
        with files_of_at_most(largest // 2):
            result = failed(saver, step, trained)
        assert "File too large" in result.error
        assert names_in(tmp_path) == {"step_00000005", "latest"}
        saver.check()
        assert [each for each in range(step + 1, 100) if saver.is_due(each)] == [next_step]
    assert saver.next_try() == "next try at step 19"

    (again,) = saver.begin(run_state(19), *trained) + saver.ended(now=19, wait=True)
    assert again.error is None
    assert is_intact(again.folder)
    assert saver.failures == 0
    assert not any(saver.is_due(each) for each in range(20, 100))

    with files_of_at_most(largest // 2):
        for step in (30, 40, 50):
            saver.check()
            failed(saver, step, trained)
        assert saver.begin(run_state(60), *trained) == []
        with pytest.raises(CheckpointError, match=r"3 saves in a row .* of step 19.* File too large"):
            saver.check()


def test_a_folder_that_cannot_be_made_is_a_failed_save(make_saver, trained, tmp_path):
    (tmp_path / ".tmp_step_00000004").write_text("in the way")
    saver = make_saver()
    assert "Not a directory" in str(failed(saver, 4, trained).error)
    assert saver.durable_step is None


# --- damage ------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [
    (flip_a_bit, "__0_0.distcp", "__0_0.distcp has checksum"),
    (cut, "__0_1.distcp", "__0_1.distcp has .* bytes instead of"),
    (Path.unlink, "__0_1.distcp", "__0_1.distcp is missing"),
    (flip_a_bit, "common.pt", "common.pt has checksum"),
    (flip_a_bit, ".metadata", ".metadata has checksum"),
    (cut, "manifest.json", "manifest.json is damaged"),
    (Path.unlink, "manifest.json", "it has no manifest.json"),
    (Path.unlink, "metadata.json", "metadata.json is missing"),
    (lambda path: shutil.rmtree(path.parent), "metadata.json", "it is missing or incomplete"),
]


@pytest.fixture(scope="module")
def intact(trained: tuple[Model, PhaseOptimizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to be copied."""
    return write_checkpoint(tmp_path_factory.mktemp("intact"), 3, *trained, tiny_config([SPARSE]))


@pytest.mark.parametrize(("damage", "name", "expected"), DAMAGES)
def test_damage_is_found_and_named(damage, name, expected, intact, tmp_path):
    folder = tmp_path / intact.name
    shutil.copytree(intact, folder)
    for checksums in (False, True):
        assert find_damage(folder, single_rank(), checksums) is None
    damage(folder / name)
    found = find_damage(folder, single_rank(), checksums=True)
    assert found is not None
    assert re.match(expected, found), found
    by_size = find_damage(folder, single_rank(), checksums=False)
    assert by_size == (None if "checksum" in expected else found)


def test_a_checkpoint_from_before_manifests_loads_unverified(intact, tmp_path, caplog):
    folder = tmp_path / intact.name
    shutil.copytree(intact, folder)
    (folder / "manifest.json").unlink()
    content = torch.load(folder / "common.pt", weights_only=False)
    content["run"]["format_version"] = 1
    torch.save(content, folder / "common.pt")
    assert find_damage(folder, single_rank(), checksums=True) is None
    assert "it is not verified" in caplog.text


def test_ranks_share_all_files_and_about_as_many_bytes():
    files = {f"{n:02d}": checkpoint_files.FileRecord(bytes=n * n, crc32="") for n in range(20)}
    shares = [checkpoint_files.share_of(files, index, 3) for index in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(record.bytes for record in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 50


def test_a_resume_looks_at_what_latest_names_then_at_older_ones_and_keeps_what_it_passes_over(tmp_path):
    for step in (1, 2, 3, 4):
        write_files(tmp_path, step, keep_last=9)
    (tmp_path / "latest").write_text("step_00000003")  # set back by hand
    names = [path.name for path in resume_candidates(tmp_path)]
    assert names == ["step_00000003", "step_00000002", "step_00000001"]
    (tmp_path / "step_00000003.damaged").mkdir()
    renamed = pass_over([tmp_path / "step_00000003"], tmp_path / "step_00000002")
    assert [path.name for path in renamed] == ["step_00000003.damaged.2"]
    assert (tmp_path / "latest").read_text() == "step_00000002"
    assert [path.name for path in complete_checkpoints(tmp_path)] == [f"step_0000000{n}" for n in (1, 2, 4)]
    (tmp_path / "latest").unlink()
    assert resume_candidates(tmp_path)[0].name == "step_00000004"


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
