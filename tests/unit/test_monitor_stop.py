"""Tests that a start after the monitor stopped the run is rejected unless something changed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gsa_train.arguments import Arguments
from gsa_train.config import Config
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.phases import phase_ranges
from gsa_train.reliability.monitor.monitor import MonitorStop, NotFinite
from gsa_train.run.folder import open_run_folder
from gsa_train.run_folder.job_start import note_job_start
from gsa_train.run_folder.resume import choose_start
from gsa_train.run_folder.spike_stop import FILE, SpikeAhead, note_stop
from helpers.single_rank import SPARSE, single_rank, tiny_config

NEW = Arguments("", (), None, False, False, False, False, 1)


@pytest.fixture
def stopped(tmp_path: Path) -> Config:
    """Return the config of a run that a spike at steps 7 to 9 ended."""
    (tmp_path / "run").mkdir()
    note_stop(tmp_path / "run", MonitorStop("step 9: the loss is 9", 7, 9), saved_step=4)
    return with_skips(tmp_path)


def with_skips(folder: Path, *steps: int) -> Config:
    logging = {"wandb": "disabled", "tensorboard": False}
    run = {"dir": str(folder), "name": "run"}
    return tiny_config([SPARSE], run=run, logging=logging, train={"iterations_to_skip": [*steps]})


def start(config: Config, **arguments: Any) -> None:
    given = dataclasses.replace(NEW, **arguments)
    choose_start(config, given, phase_ranges(config.phases), single_rank())


def test_the_same_command_is_refused_with_what_to_do(stopped: Config, tmp_path: Path) -> None:
    for config in (stopped, with_skips(tmp_path, 2, 8)):
        with pytest.raises(SpikeAhead) as refusal:
            start(config)
    text = str(refusal.value)
    assert str(tmp_path / "run" / FILE) in text
    assert "step 9: the loss is 9\nFrom step 4 on" in text
    assert "train.iterations_to_skip=[2,7,8,9]\n" in text
    for option in ("--resume-after-stop", "--resume-from", "--no-resume"):
        assert option in text


def test_where_no_batch_is_known_to_be_the_cause_none_is_named(stopped: Config, tmp_path: Path) -> None:
    note_stop(tmp_path / "run", NotFinite("step 9: a weight is NaN", 9), saved_step=4)
    for config in (stopped, with_skips(tmp_path, 9, 10)):  # these steps are not known as a cause
        with pytest.raises(SpikeAhead, match="--resume-after-stop") as refusal:
            start(config)
        assert "iterations_to_skip" not in str(refusal.value)


def test_something_different_goes_on_and_the_note_is_gone(stopped: Config, tmp_path: Path) -> None:
    start(stopped, no_resume=True)
    start(stopped, resume_after_stop=True)
    without = with_skips(tmp_path, *range(6, 11))
    start(without)
    assert (tmp_path / "run" / FILE).exists()  # until the run folder is opened
    chosen = choose_start(without, NEW, phase_ranges(without.phases), single_rank())
    open_run_folder(without, chosen, single_rank(), RunClock()).log.close(0)
    assert not (tmp_path / "run" / FILE).exists()
    start(stopped)


def test_a_restart_by_torchrun_has_no_options(stopped, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ab")
    note_job_start(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for option in ("resume_after_stop", "no_resume"):
        with pytest.raises(SpikeAhead):
            start(stopped, **{option: True})
