"""The loop's look at the gradient norms, which it leaves on the device between two logged steps; its last save."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gsa_train.checkpoint_save import CheckpointError, CheckpointSaver
from gsa_train.config import CheckpointConfig
from gsa_train.optim import build_optimizer
from gsa_train.phases import phase_spans
from gsa_train.trainer import NonFiniteError, Run, _check_norms, save_the_end
from helpers.single_rank import SPARSE, single_rank, tiny_config, tiny_model


def run_at(step: int, saved_step: int | None) -> Any:
    return Mock(step=step, saver=Mock(durable_step=saved_step, ended=Mock(return_value=[])))


def test_the_last_norm_is_the_logged_one() -> None:
    assert _check_norms(run_at(7, None), [torch.tensor(2.0), torch.tensor(0.1)]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_the_first_step_that_is_not_finite_is_named(bad: str) -> None:
    norms = [torch.tensor(1.0), torch.tensor(float(bad)), torch.tensor(float("nan"))]
    with pytest.raises(NonFiniteError, match=f"step 19: the gradient norm is {bad}. .* after step 10"):
        _check_norms(run_at(20, 10), norms)


def limit_files_to(size_bytes: int) -> None:
    """The kernel refuses to let any file of this process grow beyond that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def test_the_last_save_is_tried_again_until_it_works_or_has_failed_too_often(tmp_path: Path) -> None:
    config = tiny_config([SPARSE])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    (span,) = phase_spans(config.phases)
    checkpoint_config = CheckpointConfig(save_retries=1)
    run = Run(
        config=config,
        parallel=single_rank(),
        model=model,
        batches=Mock(state=dict),
        validation_sets=[],
        tokenizer=Mock(),
        saver=CheckpointSaver(tmp_path, checkpoint_config, single_rank()),
        sinks=Mock(),
        progress=Mock(),
        wandb_run_id=None,
        step=3,
    )
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
