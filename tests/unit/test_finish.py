"""The end of a run that is complete: what cannot be drawn costs no exit code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gsa_train.monitor.monitor import NotFinite
from gsa_train.report import plots
from gsa_train.run import finish
from gsa_train.run.finish import _goes_on_without
from gsa_train.run.state import Run
from helpers.single_rank import SPARSE, tiny_config
from helpers.tiny_run import tiny_run


def run_that_hears(messages: list[str]) -> Run:
    log: Any = SimpleNamespace(message=messages.append)
    return cast(Run, SimpleNamespace(services=SimpleNamespace(log=log)))


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), ModuleNotFoundError("No module named 'plotly'")]
)
def test_a_report_that_cannot_be_written_is_told_and_ends_nothing(error: Exception) -> None:
    messages: list[str] = []
    with _goes_on_without(run_that_hears(messages), "plots and report"):
        raise error
    assert messages == [f"plots and report cannot be written: {error}"]


def test_a_mistake_in_the_report_is_no_missing_file() -> None:
    with pytest.raises(ValueError, match="a mistake"), _goes_on_without(run_that_hears([]), "the report"):
        raise ValueError("a mistake")


def test_no_rank_waits_for_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a watch, for which more than `parallel.timeout_minutes` at the end is a hang."""
    drawn: list[Path] = []

    def write(folder: Path) -> list[Path]:
        drawn.append(folder)
        return [folder / "plots" / "loss.png"]

    monkeypatch.setattr(plots, "write_plots", write)
    monkeypatch.setattr(finish, "write_report", lambda folders, path: path)
    monkeypatch.setattr(finish, "validate", lambda *_: {"validation_loss": 2.0})
    monkeypatch.setattr(finish, "summary_of", lambda *_: {"steps": 0})
    config = tiny_config([SPARSE], run={"dir": str(tmp_path), "name": "a"})
    model: Any = None
    run = tiny_run(config, model)
    finish.finish(run, SPARSE)
    assert drawn == []
    finish.draw(run)
    assert drawn == [tmp_path / "a"]
    finish.draw(replace(run, parallel=replace(run.parallel, rank=1)))
    assert drawn == [tmp_path / "a"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_whose_model_gives_no_finite_loss_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    monkeypatch.setattr(finish, "validate", lambda *_: {"validation_loss": loss})
    model: Any = None
    run = tiny_run(tiny_config([SPARSE], run={"dir": str(tmp_path), "name": "a"}), model, step=7)
    with pytest.raises(NotFinite, match=rf"step 7, the last one: the loss of the validation is {loss}"):
        finish.finish(run, SPARSE)
    assert not run.services.log.sinks.finish.called
