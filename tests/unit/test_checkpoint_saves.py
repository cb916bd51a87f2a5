"""Tests saves in the background, and saves that fail."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gsa_train.checkpoint import files as checkpoint_files
from gsa_train.checkpoint import save, staging
from gsa_train.checkpoint.finite import _all_finite
from gsa_train.checkpoint.save import CheckpointError, CheckpointSaver, SaveResult
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer
from helpers import saving
from helpers.checkpoints import run_state
from helpers.saving import LR, is_intact, names_in
from helpers.single_rank import SPARSE, random_batches, take_step, tiny_model

# pytest finds the fixtures here.
config, trained, make_saver = saving.config, saving.trained, saving.make_saver


# --- what may be saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("held", ["weight", "exp_avg_sq"])
def test_no_checkpoint_is_made_of_what_is_not_finite_and_none_deleted_for_it(
    make_saver, trained, tmp_path, held, value
):
    saver = make_saver(async_save=False, keep_last=1)
    (good,) = saver.begin(run_state(1), *trained)
    tensor = next(trained[0].module.parameters()).data
    if held != "weight":
        tensor = next(trained[1].state_parts()).tensors[held]
    before, tensor.view(-1)[3] = tensor.view(-1)[3].item(), value
    (refused,) = saver.begin(run_state(2), *trained)
    assert refused.not_finite
    assert refused.error.startswith(f"values that are not finite (rank 0: 1 of {tensor.numel()} in ")
    assert names_in(tmp_path) == {"step_00000001", "latest"}
    assert is_intact(good.folder)
    assert (saver.durable_step, saver.failures) == (1, 0)
    tensor.view(-1)[3] = before
    (again,) = saver.begin(run_state(2), *trained)
    assert again.error is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_values_are_finite(dtype):
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    both = [largest, torch.zeros(0, dtype=dtype), -largest, torch.ones(2)]
    assert _all_finite(both)
    for value in (torch.nan, torch.inf, -torch.inf):
        assert not _all_finite([*both, torch.tensor([0, value, 0], dtype=dtype)])


# --- in the background -------------------------------------------------------------------------------------


@contextmanager
def held_back(saver: CheckpointSaver) -> Iterator[threading.Event]:
    """Keep the saver's thread busy until the event is set."""
    go_on = threading.Event()
    saver._thread.submit(go_on.wait)
    try:
        yield go_on
    finally:
        go_on.set()


def test_an_update_waits_for_the_copies_and_the_files_match_a_save_that_everything_waits_for(
    make_saver, config, tmp_path, monkeypatch
):
    """The copies begin when the next step is about to update, and no earlier."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    take_step(model, optimizer, random_batches(config, 0), config, lr=LR)
    (waited,) = make_saver(async_save=False).begin(run_state(1), model, optimizer)
    expected = checkpoint_files.read_manifest(waited.folder).files
    shutil.rmtree(waited.folder)
    before = [parameter.detach().clone() for parameter in model.gpt.parameters()]

    reaches_update, copied = threading.Event(), []
    copy_all = staging._copy_all

    def copy_late(pairs):
        assert reaches_update.wait(60)
        copied.append(len(pairs))
        copy_all(pairs)

    monkeypatch.setattr(staging, "_copy_all", copy_late)
    saver = make_saver()
    assert saver.begin(run_state(1), model, optimizer) == []
    assert saver.has(1)
    assert saver.durable_step is None

    def hold_update():
        assert not copied
        reaches_update.set()
        saver.hold_update()
        assert copied
        assert all(map(torch.equal, before, model.gpt.parameters()))

    take_step(model, optimizer, random_batches(config, 1), config, lr=LR, hold_update=hold_update)
    assert not all(map(torch.equal, before, model.gpt.parameters()))
    assert sum(copied) > 20
    (result,) = saver.ended(now=2, wait=True)
    assert saver.durable_step == 1
    found = checkpoint_files.read_manifest(result.folder).files
    tensors = {name for name in expected if name.endswith(".distcp")}
    assert len(tensors) > 1
    assert {name: found[name] for name in tensors} == {name: expected[name] for name in tensors}
    held = saver.take_held_seconds()
    assert result.stall_seconds > held > 0
    assert saver.take_held_seconds() == 0  # reported once
    saver.hold_update()  # no save is running


def test_the_copies_of_a_save_that_another_rank_cannot_make_are_dropped(make_saver, trained, monkeypatch):
    """The dropped copies have ended when the next save may use their memory."""
    saver, errors = make_saver(), iter([None, "rank 1: no copy in host memory"])
    with monkeypatch.context() as patch:
        patch.setattr(save, "first_said", lambda error, group: next(errors))
        (result,) = saver.begin(run_state(1), *trained)
    assert result.error == "rank 1: no copy in host memory"
    assert names_in(result.folder.parent) == set()
    (again,) = saver.begin(run_state(2), *trained) + saver.ended(now=2, wait=True)
    assert is_intact(again.folder)


def test_a_large_share_goes_into_more_files(make_saver, trained, monkeypatch):
    assert [save.files_of(size) for size in (0, 1 << 31, 24 * 10**9, 1 << 40)] == [2, 2, 8, 8]
    monkeypatch.setattr(save, "FILE_BYTES", 20_000)
    (result,) = make_saver(async_save=False).begin(run_state(1), *trained)
    assert len(list(result.folder.glob("__0_*.distcp"))) > 2
    assert is_intact(result.folder)


def test_the_next_save_waits_for_the_one_under_way(make_saver, trained, tmp_path):
    saver = make_saver()
    with held_back(saver) as go_on:
        saver.begin(run_state(1), *trained)
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
        saver.close()  # without telling other ranks, as when an exception ends this one
    assert is_intact(tmp_path / "step_00000001")


# --- saves that fail ---------------------------------------------------------------------------------------


def failed(saver: CheckpointSaver, step: int, trained: tuple[Model, PhaseOptimizer]) -> SaveResult:
    (result,) = saver.begin(run_state(step), *trained) + saver.ended(now=step, wait=True)
    assert result.error is not None
    return result


def test_tries_come_at_growing_intervals_and_in_the_end_stop_the_run(make_saver, trained, monkeypatch):
    saver = make_saver(every_steps=18, save_retries=2, retry_after_steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(save, "write_manifest", lambda *_: [].pop())
        for step, next_step in ((10, 13), (13, 19)):
            failed(saver, step, trained)
            saver.check()
            assert [each for each in range(step + 1, 100) if saver.is_due(each) and each % 18] == [next_step]
        assert saver.next_try() == "next try at step 18, or at the end of the run"
        failed(saver, 19, trained)
        assert saver.begin(run_state(60), *trained) == []
        with pytest.raises(CheckpointError, match=r"3 saves in a row .*pop from empty list"):
            saver.check()


@pytest.mark.parametrize(
    ("owner", "name", "fails", "said"),
    [
        (
            staging,
            "_copy_all",
            lambda _: torch.ones(2).copy_(torch.ones(3)),
            "RuntimeError('The size of tensor",
        ),
        (save, "write_manifest", lambda *_: [].pop(), "IndexError('pop from empty list')"),
    ],
)
def test_what_fails_in_the_background_is_a_failed_save_and_stops_no_update(
    make_saver, trained, tmp_path, monkeypatch, owner, name, fails, said
):
    saver = make_saver()
    (good,) = saver.begin(run_state(1), *trained) + saver.ended(now=1, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        assert saver.begin(run_state(2), *trained) == []
        saver.hold_update()
        (result,) = saver.ended(now=2, wait=True)
    assert str(result.error).startswith(f"rank 0: {said}")
    assert names_in(tmp_path) == {"step_00000001", "latest"}
    assert is_intact(good.folder)
    (again,) = saver.begin(run_state(2), *trained) + saver.ended(now=2, wait=True)
    assert is_intact(again.folder)


def test_a_save_has_taken_the_time_until_it_is_durable(make_saver, trained, monkeypatch):
    durable_at, before = [], time.perf_counter()
    monkeypatch.setattr(save, "prune", lambda *_: durable_at.append(time.perf_counter()) or [])
    saver = make_saver()
    saver.begin(run_state(7), *trained)
    (result,) = saver.ended(now=7, wait=True)
    assert 0 < result.save_seconds <= durable_at[0] - before


def test_a_checkpoint_is_saved_though_older_ones_cannot_be_looked_for(make_saver, trained, monkeypatch):
    def prune(*_):
        raise OSError("Stale file handle")

    monkeypatch.setattr(save, "prune", prune)
    saver = make_saver()
    (result,) = saver.begin(run_state(1), *trained) + saver.ended(now=1, wait=True)
    assert result.error is None
    assert result.warnings == ["old checkpoints could not be deleted: Stale file handle"]
    assert saver.durable_step == 1
