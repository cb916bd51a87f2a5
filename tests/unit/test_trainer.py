"""The loop's last saves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from gsa_train.checkpoint.save import CheckpointError, CheckpointSaver
from gsa_train.config import CheckpointConfig
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer
from gsa_train.phases import PhaseSpan, phase_spans
from gsa_train.trainer import Run, newest_save, save, save_the_end
from helpers.single_rank import SPARSE, single_rank, tiny_config, tiny_model
from helpers.tiny_run import tiny_run


def limit_files_to(size_bytes: int) -> None:
    """The kernel refuses to let any file of this process grow beyond that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def run_of(folder: Path, checkpoint_config: CheckpointConfig) -> tuple[Run, PhaseSpan, PhaseOptimizer]:
    """After three steps."""
    config = tiny_config([SPARSE])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    (span,) = phase_spans(config.phases)
    run = tiny_run(
        config,
        model,
        saver=CheckpointSaver(folder, checkpoint_config, single_rank()),
        step=3,
    )
    return run, span, optimizer


def test_an_end_by_a_spike_names_the_save_that_was_under_way(tmp_path: Path) -> None:
    run, span, optimizer = run_of(tmp_path, CheckpointConfig())
    records: list[dict[str, Any]] = []
    run.sinks.log = records.append  # type: ignore[union-attr,method-assign]
    save(run, span, optimizer)
    assert run.saver.durable_step is None
    run.step = 4
    assert newest_save(run) == 3
    assert [(record["event"], record["step"]) for record in records] == [("checkpoint", 3)]
    run.saver.close()


def test_a_rewind_forgets_the_save_that_was_to_be_tried_again(tmp_path: Path) -> None:
    run, span, optimizer = run_of(tmp_path, CheckpointConfig(retry_after_steps=2))
    try:
        limit_files_to(10_000)
        save(run, span, optimizer)
        (failed,) = run.saver.ended(now=4, wait=True)
    finally:
        limit_files_to(resource.RLIM_INFINITY)
    assert failed.error is not None
    assert run.saver.is_due(6)
    run.saver.go_back(2)
    assert not run.saver.is_due(6)
    assert run.saver.has(2)
    run.saver.close()


def test_the_last_save_is_tried_again_until_it_works_or_has_failed_too_often(tmp_path: Path) -> None:
    run, span, optimizer = run_of(tmp_path, CheckpointConfig(save_retries=1))
    events: list[str] = []

    def log(record: dict[str, Any]) -> None:
        events.append(record["event"])
        if len(events) == 1:
            limit_files_to(resource.RLIM_INFINITY)

    run.sinks.log = log  # type: ignore[union-attr,method-assign]
    try:
        limit_files_to(10_000)
        save_the_end(run, span, optimizer)
        assert run.saver.durable_step == 3
        assert (tmp_path / "latest").read_text() == "step_00000003"
        assert events == ["checkpoint_failed", "checkpoint"]

        run.step = 4
        limit_files_to(10_000)
        with pytest.raises(CheckpointError, match=r"2 saves in a row failed .* of step 3\."):
            save_the_end(run, span, optimizer)
    finally:
        limit_files_to(resource.RLIM_INFINITY)
        run.saver.close()
