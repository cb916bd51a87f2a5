"""Tests the end of a complete run."""

import math
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from gsa_train.metrics.sinks import Sinks
from gsa_train.reliability.monitor.monitor import NotFinite
from gsa_train.run import finish
from gsa_train.run.state import Run
from gsa_train.run_folder.lock import RunFolderError
from helpers.single_rank import SPARSE, tiny_config
from helpers.tiny_run import tiny_run


def run_in(folder: Path, **fields: Any) -> tuple[Run, Mock]:
    console, model = Mock(), cast(Any, None)
    config = tiny_config([SPARSE], run={"dir": str(folder), "name": "a"})
    return tiny_run(config, model, console=console, **fields), console


def test_a_run_whose_model_gives_no_finite_loss_is_not_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "validate", lambda *_: {"validation_loss": math.inf})
    run, _ = run_in(tmp_path, step=7)
    with pytest.raises(NotFinite, match=r"step 7, the last one: the loss of the validation is inf"):
        finish.finish(run, SPARSE)
    assert not run.services.log.sinks.finish.called


def test_a_summary_that_cannot_be_written_is_a_line_and_loses_no_number(tmp_path, monkeypatch):
    """A traceback of the main rank would leave the other ranks waiting."""
    (tmp_path / "a" / "summary.json").mkdir(parents=True)
    left: list[int] = []
    monkeypatch.setattr(finish, "validate", lambda *_: {"validation_loss": 2.0})
    monkeypatch.setattr(finish, "summary_of", lambda *_: {"val_loss": 2.5, "by": {"\x1b[2J a\nb": 7}})
    monkeypatch.setattr(finish, "leave_world", lambda watchdog: left.append(watchdog.exit_code))
    run, console = run_in(tmp_path, sinks=Sinks(tmp_path / "a", None, None))
    said = r"saved, but its summary\.json cannot be written: .*/a/summary\.json'; make room .* trains no step"
    with pytest.raises(RunFolderError, match=said):
        finish.finish(run, SPARSE)
    assert left == [2]
    printed = [call.args[0].strip() for call in console.message.call_args_list]
    assert "val_loss  2.5" in printed
    assert r"by \x1b[2J a\nb  7" in printed  # from a source's name: it would clear the screen
