"""Tests what the host does with verdicts: when it reads and counts them, and its policies."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_train.arguments import Arguments
from gsa_train.config import Config, MonitorConfig, PhaseConfig
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.phases import PhaseRange, phase_ranges
from gsa_train.reliability.monitor.layer_watch import LayerWatch
from gsa_train.reliability.monitor.monitor import (
    SPIKE_GAP_STEPS,
    Monitor,
    MonitorState,
    MonitorStop,
    NotFinite,
    state_of,
)
from gsa_train.reliability.monitor.spikes import Verdict
from gsa_train.run.folder import open_run_folder
from gsa_train.run_folder.job_start import note_job_start
from gsa_train.run_folder.resume import choose_start
from gsa_train.run_folder.spike_stop import FILE, SpikeAhead, note_stop
from helpers.single_rank import SPARSE, single_rank, tiny_config

SPAN = PhaseRange(1, PhaseConfig(name="sparse", steps=1000), 0, 1000)
CPU = torch.device("cpu")


class Steps:
    """Holds a monitor, and sends it the verdicts of an invented run."""

    def __init__(self, state: MonitorState | None = None, **fields: Any) -> None:
        self.config = MonitorConfig(**fields)
        self.events: list[dict[str, Any]] = []
        self.monitor = Monitor(
            self.config, SPAN, CPU, state or MonitorState(1), self.events.append, lambda: None
        )
        self.step = 0

    def take(self, kinds: str) -> None:
        """Take steps, each read at once: `.` is quiet, `s` a spike, `n` not a number."""
        for kind in kinds:
            self.send(kind)
            self.monitor.read(self.step)

    def send(self, kind: str) -> None:
        self.step += 1
        loss = {".": 4.0, "s": 9.0, "n": math.nan}[kind]
        applied = kind == "." or (kind == "s" and self.config.action == "log")
        row = [loss, 0.5, 5.0, math.log(2.0), kind == "s", False, kind != "n", applied]
        self.monitor.observe(
            self.step, Verdict(torch.tensor(applied), torch.tensor(row, dtype=torch.float32))
        )


def test_a_verdict_is_read_at_a_fixed_step_whatever_has_arrived() -> None:
    steps = Steps(action="skip")
    for kind in ".s.":
        steps.send(kind)
    steps.monitor.read(1)
    assert not steps.events
    steps.monitor.read(2)
    spike = {"event": "spike", "step": 2, "phase": "sparse", "signal": "loss", "value": 9.0}
    assert steps.events == [{**spike, "threshold": 5.0, "action": "skip"}]


def test_neighbouring_flags_are_one_spike() -> None:
    steps = Steps(action="skip")
    gap = "." * SPIKE_GAP_STEPS
    steps.take("s" + gap[1:] + "ss" + gap + "s" + "." * 50)
    metrics = steps.monitor.metrics()
    assert (metrics["spikes"], metrics["skipped_updates"]) == (2, 4)
    assert metrics["spikes_per_100k_steps"] == pytest.approx(1e5 * 2 / steps.step)


STOPS = [
    ({"action": "log"}, "ssssssss", "n", r"step 9: the loss is nan\. Nothing was saved after step 0"),
    ({"action": "stop", "patience_steps": 3}, "ss.ss.sn.", "sss", r"step 12: .* 3 steps in a row"),
    ({"action": "skip", "max_skips_in_a_row": 7}, "ssssss.", "sssssnn", "7th step in a row"),
]
"""Config fields, steps that do not stop the run, further steps that do, and the message of the stop."""


@pytest.mark.parametrize(("fields", "before", "last", "said"), STOPS, ids=lambda each: str(each))
def test_what_stops_a_run(fields: dict[str, Any], before: str, last: str, said: str) -> None:
    steps = Steps(**fields)
    steps.take(before)
    with pytest.raises(MonitorStop, match=said):
        steps.take(last)


def test_the_state_of_a_checkpoint_goes_on_and_another_phase_starts_from_nothing() -> None:
    steps = Steps(action="skip")
    steps.take("." * 140 + "ss")
    steps.monitor.watch_layers(142, {"layer_max_activation": [1.0, 2.0]})
    assert state_of({}) == MonitorState(), "of a checkpoint from before the monitor"
    saved = dataclasses.asdict(steps.monitor.state())
    again = Steps(state_of(saved | {"rewinds": []}), action="skip")  # of an earlier version
    assert dataclasses.asdict(again.monitor.state()) == saved
    assert again.monitor.metrics() == steps.monitor.metrics()
    assert steps.monitor.metrics()["spike_score"] > 0  # OLMo's own rule needs no flag
    following = Monitor(
        again.config, dataclasses.replace(SPAN, index=2), CPU, state_of(saved), print, lambda: 7
    )
    assert following.metrics() == steps.monitor.metrics()
    state = following.state()
    assert (state.in_a_row, state.recent, state.layers) == (0, [], {})
    assert state.detector["steps"] == 0


# --- layers -------------------------------------------------------------------------------------------------


def test_a_layer_that_jumps_is_named_and_one_that_grows_is_not() -> None:
    watch = LayerWatch({})
    for step in range(200):
        values = [1.02**step, 3.0 + 0.1 * (step % 5)]
        if step == 150:
            values[1] = 30.0
        jumps = watch.look({"layer_max_activation": values, "update_norm": 0.1})
        named = [(jump["signal"], jump["layer"], jump["value"]) for jump in jumps]
        assert named == ([("max_activation", 1, 30.0)] if step == 150 else [])


def test_layers_without_a_value_are_left_alone() -> None:
    watch = LayerWatch({})
    for _ in range(40):
        assert watch.look({"layer_indexer_kl": [math.nan, 0.5], "layer_value_gate_low": [0.0, 0.0]}) == []
    assert [jump["layer"] for jump in watch.look({"layer_indexer_kl": [math.nan, 9.0]})] == [1]


# --- a start after the monitor stopped the run is refused unless something changed -------------------------

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
    open_run_folder(without, chosen, single_rank(), GoodputLog(RunClock()))[0].close(0)
    assert not (tmp_path / "run" / FILE).exists()
    start(stopped)


def test_a_restart_by_torchrun_has_no_options(stopped, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ab")
    note_job_start(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for option in ("resume_after_stop", "no_resume"):
        with pytest.raises(SpikeAhead):
            start(stopped, **{option: True})
