"""Tests the training loop: its last saves, and its clocks."""

import dataclasses
import itertools
import math
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gsa_train import trainer
from gsa_train.checkpoint.save import CheckpointError, CheckpointSaver
from gsa_train.config import CheckpointConfig
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import Sinks
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.profiling import work_time
from gsa_train.reliability.monitor.corruption import CorruptionFound
from gsa_train.reliability.monitor.monitor import MonitorStop
from gsa_train.reliability.stop_signals import Stopped
from gsa_train.run import finish, saves
from gsa_train.run.saves import newest_save, save, save_the_end
from gsa_train.run.state import Run
from gsa_train.services import Service
from gsa_train.step import StepResult, train_step
from gsa_train.train import train_phases
from gsa_train.trainer import run_phase
from helpers.faults import let_files_grow_to
from helpers.single_rank import SPARSE, single_rank, tiny_config, tiny_model
from helpers.tiny_run import tiny_run


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Return a function after which no large file can be written, to the end of the test."""
    yield lambda: let_files_grow_to(10_000)
    let_files_grow_to(resource.RLIM_INFINITY)


@contextmanager
def run_of(
    folder: Path, log: Callable[[dict[str, Any]], None] = lambda record: None, **fields: Any
) -> Iterator[Any]:
    """Yield what a save takes: a run at step 3, its phase and optimizer. `fields` are of `checkpoint`."""
    config = tiny_config([SPARSE])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    (phase_range,) = phase_ranges(config.phases)
    saver = CheckpointSaver(folder, CheckpointConfig(**fields), single_rank())
    run = tiny_run(config, model, saver=saver, step=3, sinks=Mock(log=log))
    yield run, phase_range, optimizer
    saver.close()


def test_an_end_by_a_spike_names_the_save_that_was_under_way(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    with run_of(tmp_path, records.append) as (run, *phase):
        save(run, *phase)
        assert run.services.saver.durable_step is None
        run.state.step = 4
        assert newest_save(run) == 3
    assert [(record["event"], record["step"]) for record in records] == [("checkpoint", 3)]


def test_the_last_save_is_tried_again_until_it_works_or_has_failed_too_often(
    tmp_path, full_disk, monkeypatch
):
    """The save fails before the run would count as hanging."""
    events: list[str] = []

    def log(record: dict[str, Any]) -> None:
        events.append(record["event"])
        if len(events) == 1:
            let_files_grow_to(resource.RLIM_INFINITY)

    waits: list[float] = []
    monkeypatch.setattr(saves, "time", Mock(sleep=waits.append))
    with run_of(tmp_path, log, save_retries=12) as (run, *phase):
        full_disk()
        save_the_end(run, *phase)
        assert run.services.saver.durable_step == 3
        assert (tmp_path / "latest").read_text() == "step_00000003"
        assert events == ["checkpoint_failed", "checkpoint"]
        run.state.step, waits[:] = 4, []
        full_disk()
        with pytest.raises(CheckpointError, match=r"13 saves in a row failed .* of step 3\."):
            save_the_end(run, *phase)
        assert waits[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert max(waits) <= 0.5 * 60 * run.config.parallel.timeout_minutes


def test_steps_that_a_phase_does_not_log_count_for_none_of_the_next_one(monkeypatch):
    first, second = (dataclasses.replace(SPARSE, name=name, steps=4) for name in ("first", "second"))
    skipped = {"iterations_to_skip": [4]}  # the first phase's last step, which would be logged
    config = tiny_config([first, second], logging={"every_steps": 1000}, train=skipped)
    model = tiny_model(config, variance_ema=0.02)
    records: list[dict[str, Any]] = []
    run = tiny_run(config, model, sinks=Mock(log=records.append))
    ticks = itertools.count(0.0, 1.0)
    monkeypatch.setattr(work_time, "time", Mock(perf_counter=lambda: next(ticks)))
    for phase_range in phase_ranges(config.phases):
        optimizer = build_optimizer(model, phase_range.phase, config)
        run_phase(run, phase_range, optimizer)
        close_optimizer(model, optimizer)
    steps = [record for record in records if "event" not in record]
    assert [record["step"] for record in steps] == [1, 5, 8]
    assert steps[0]["forward_backward_seconds"] == steps[1]["forward_backward_seconds"]
    assert steps[0]["optimizer_seconds"] == steps[1]["optimizer_seconds"]


class FailedStep(Exception):
    pass


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("fails_at", [None, 4])
def test_a_late_record_is_written_when_the_next_step_is_launched(late, fails_at, tmp_path, monkeypatch):
    """The record is also written before a save, at a phase's end, and when the next step fails."""
    phase = dataclasses.replace(SPARSE, steps=6)
    config = tiny_config([phase], logging={"every_steps": 3})
    model = tiny_model(config, variance_ema=0.02)
    seen: dict[str, list[int]] = {}

    def logged() -> list[int]:
        return [record["step"] for record in read_records(tmp_path / "metrics.jsonl")]

    def step(training: Any, micro_batches: Any, lr: float, number: int, **options: Any) -> StepResult:
        if number + 1 == fails_at:
            raise FailedStep
        result = train_step(training, micro_batches, lr, number, **options)
        seen[f"step {number + 1}"] = logged()
        return result

    def save_now(run: Run, *_: Any) -> None:
        seen[f"save {run.state.step}"] = logged()

    monkeypatch.setattr(trainer, "train_step", step)
    monkeypatch.setattr(trainer, "save", save_now)
    monkeypatch.setattr("gsa_train.train.save_the_end", save_now)
    saver = Mock(is_due=lambda step: step in (2, 3), ended=lambda now: [], take_held_seconds=lambda: 0.0)
    optimizer, sinks = build_optimizer(model, phase, config), Sinks(tmp_path, None, None)
    run = tiny_run(config, model, saver=saver, sinks=sinks, phase_optimizer=optimizer, writes_late=late)
    with nullcontext() if fails_at is None else pytest.raises(FailedStep):
        train_phases(run, phase_ranges(config.phases))
    assert (seen["step 1"], seen["step 2"]) == ([], [] if late else [1])
    assert (seen["save 2"], seen["save 3"]) == ([1], [1, 3])
    assert logged() == seen.get("save 6", [1, 3])
    assert seen.get("save 6") == (None if fails_at else [1, 3, 6])


@pytest.mark.parametrize("part", ["linear_qkv", "indexer"])
def test_a_step_whose_numbers_are_nan_is_logged_and_left_out(part, monkeypatch):
    phase = dataclasses.replace(SPARSE, steps=3)
    config = tiny_config([phase], logging={"every_steps": 1}, monitor={"action": "skip"})
    model = tiny_model(config, variance_ema=0.02)
    weight = next(each for name, each in model.gpt.named_parameters() if part in name and each.dim() == 2)

    def step(training: Any, micro_batches: Any, lr: float, number: int, **options: Any) -> StepResult:
        kept = weight.detach().clone()
        if number == 1:
            weight.detach().fill_(math.nan)
        result = train_step(training, micro_batches, lr, number, **options)
        if number == 1:
            weight.detach().copy_(kept)
        return result

    monkeypatch.setattr(trainer, "train_step", step)
    records: list[dict[str, Any]] = []
    held = iter([0.0, 1e9, 0.0])  # an update that waited for copies, limited by the training time
    saver = Mock(is_due=lambda step: False, ended=lambda now: [], take_held_seconds=held.__next__)
    run = tiny_run(config, model, sinks=Mock(log=records.append), saver=saver)
    optimizer = build_optimizer(model, phase, config)
    assert run_phase(run, phase_ranges(config.phases)[0], optimizer) is None
    spent = run.services.goodput.clock.read()[1]
    assert spent["copies"] > 0 < spent["training"]
    close_optimizer(model, optimizer)
    first, left_out, last = (record for record in records if "event" not in record)
    assert math.isnan(left_out["variance" if part == "indexer" else "recall"])
    assert left_out["update_norm"] == 0 < first["update_norm"]
    for record in (first, last):
        assert all(math.isfinite(record[name]) for name in ("loss", "recall", "variance", "variance_ema"))


def test_batches_left_out_are_told_of_also_after_a_range_that_a_start_before_has_left_out() -> None:
    phase = dataclasses.replace(SPARSE, steps=7)
    config = tiny_config([phase], train={"iterations_to_skip": [2, 3, 4, 5, 7]})
    model = tiny_model(config, variance_ema=0.02)
    optimizer = build_optimizer(model, phase, config)
    records: list[dict[str, Any]] = []
    run = tiny_run(config, model, sinks=Mock(log=records.append), start=Mock(step=2), step=2)
    service = Mock(spec=Service)
    run.listening.append(service)
    run_phase(run, phase_ranges(config.phases)[0], optimizer)
    close_optimizer(model, optimizer)
    told = [(record["step"], record["last_step"]) for record in records if "last_step" in record]
    assert told == [(3, 5), (7, 7)]
    ended = [call.args[0].step for call in service.after_step.call_args_list]
    assert (service.on_batch.call_count, ended) == (1, [3, 4, 5, 6, 7]), "services hear of every step"


@pytest.mark.parametrize(("end", "code"), [("leave", 75), ("give_up", 13), ("give_up_corrupted", 14)])
def test_a_note_that_cannot_be_written_changes_no_exit_code(end, code, tmp_path, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(finish, "_close", lambda run, code: codes.append(code))
    config = tiny_config([SPARSE], run={"dir": str(tmp_path)})
    saver = Mock(ended=lambda now, wait: [], durable_step=2)
    run = tiny_run(config, tiny_model(config), saver=saver)
    (tmp_path / config.run.name).write_text("a file where the run's folder should be")
    if end == "leave":
        finish.leave(run, Stopped(15, 3))
    elif end == "give_up":
        finish.give_up(run, MonitorStop("a spike", 2, 3), SPARSE)
    else:
        finish.give_up_corrupted(run, CorruptionFound("wrong bits"))
    assert codes == [code]
    console = run.services.log.console
    said = console.message.call_args_list[0].args[0]
    assert "cannot be written" in said
