"""Tests spikes in real runs: the steps of detection, the actions, and the final state."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gsa_train.metrics.record_format import read_records
from gsa_train.process.exit_codes import STOPPED_BY_MONITOR
from helpers.fault_plans import FaultPlan
from helpers.runs import numbers_of
from helpers.tiers import runs_nightly

pytestmark = pytest.mark.slow

STEPS = 56
SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 128},
    "gsa": {"indexer_heads": 2, "indexer_dim": 16, "k_base": 16, "k_min": 8, "k_max": 32},
    "train": {"seq_len_tokens": 64, "micro_batch_size": 4, "global_batch_size": 4},
    "evaluate": {"every_steps": 0, "max_blocks": 8, "ngram_baselines": False},
    "checkpoint": {"every_steps": 40, "keep_last": 9},
    "logging": {"every_steps": 1, "wandb": "disabled", "tensorboard": False, "plots": False},
    "monitor": {
        "window_steps": 40,
        "min_history_steps": 24,
        "grad_norm_min_ratio": 5.0,  # so early and so small, the norm sometimes triples
        "lower_lr_steps": 4,
        "rewind_min_steps": 5,
        "rewind_skip_before_steps": 2,
        "rewind_skip_after_steps": 4,
    },
}
PHASE = {"name": "sparse", "steps": STEPS, "lr": 2e-3, "min_lr": 2e-3, "warmup_steps": 10}

TEXT = {"random_tokens": [[33, 33], [45, 49]]}
"""One batch of uniformly random tokens, and five of them; the checkpoint is in between."""
POISONED = [33, 45, 46, 47, 48, 49]
EVERY_FIFTH = "logging.every_steps=5"
"""The host reads verdicts when they are READ_DELAY_STEPS old, or at a logged step."""
LEFT_OUT = list(range(43, 52))
"""From 2 steps before the spike's first step, 45, to 4 after its third; then the run goes back."""


@dataclass
class Finished:
    folder: Path
    codes: list[int]
    """Exit codes of the ranks."""

    @property
    def log(self) -> str:
        return self.folder.with_suffix(".log.0").read_text()

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the records of one kind of event; None: of the steps."""
        records = read_records(self.folder / "metrics.jsonl")
        return [record for record in records if record.get("event") == event]

    def spikes(self) -> list[int]:
        return [record["step"] for record in self.records("spike")]

    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.records()}

    def numbers(self, after: int, *without: str) -> list[dict[str, Any]]:
        """Return every record after a step, except saves, times and the named keys."""
        records = read_records(self.folder / "metrics.jsonl")
        return numbers_of((record for record in records if record["step"] > after), keys=without)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Run all runs of this file from one process that has imported everything, two of one rank in parallel."""
    folder = tmp_path_factory.mktemp("spikes")
    plan = FaultPlan(folder, SECTIONS, [PHASE])
    run = plan.run

    def goes_on(name: str, source: str, *overrides: str, ranks: int = 1) -> dict[str, Any]:
        """Resume from a copy of a run's folder, as after a kill between its checkpoint and the end."""
        copied = {"copy_of": [str(folder / source), str(folder / name)], "latest": "step_00000040"}
        return run(name, *overrides, ranks=ranks, **TEXT) | copied

    skip, lower, rewind, stop = (
        f"monitor.action={action}" for action in ("skip", "lower_lr", "rewind", "stop")
    )
    left_out = f"train.iterations_to_skip={LEFT_OUT}"
    # Up to step 40 `rewind`, `stop` and `lower_lr` would equal `skip`, and runs that only log would equal `clean`.
    waves = [
        [run("clean"), run("skip", skip, **TEXT)],
        [goes_on("rewind", "skip", rewind, EVERY_FIFTH), goes_on("stop", "skip", stop, EVERY_FIFTH)],
        [goes_on("skip, resumed", "skip", skip), goes_on("restart", "stop", rewind, EVERY_FIFTH, left_out)],
        [goes_on("stop, again", "stop", stop, EVERY_FIFTH), goes_on("lower_lr", "skip", lower)],
    ]
    at_night = [
        [goes_on("rewind, resumed", "rewind", rewind, EVERY_FIFTH)],
        [goes_on("split", "skip", skip, "parallel.tensor=2", ranks=2)],
    ]
    codes = plan.carry_out(waves + at_night * runs_nightly(request))
    return {name: Finished(folder / name, of_run) for name, of_run in codes.items()}


def test_without_faults_nothing_happens(runs):
    clean = runs["clean"]
    assert clean.codes == [0]
    assert not clean.spikes()
    last = clean.records()[-1]
    counts = ("spikes", "spikes_per_100k_steps", "skipped_updates", "rewinds")
    assert [last[name] for name in counts] == [0, 0, 0, 0]
    assert all(record["update_norm"] > 0 for record in clean.records())


def test_updates_from_bad_batches_are_left_out_at_once(runs):
    skip, clean = runs["skip"], runs["clean"]
    assert skip.spikes() == POISONED
    assert {record["action"] for record in skip.records("spike")} == {"skip"}
    assert [record["step"] for record in skip.records() if record["update_norm"] == 0] == POISONED
    assert all(skip.losses()[step] == clean.losses()[step] for step in range(1, 33))
    last = skip.records()[-1]
    assert (last["spikes"], last["skipped_updates"], last["spikes_per_100k_steps"]) == (2, 6, 2e5 / STEPS)


def test_a_run_resumed_between_two_spikes_is_the_uninterrupted_one(runs):
    assert runs["skip, resumed"].numbers(0) == runs["skip"].numbers(0)


@pytest.mark.nightly
def test_two_ranks_decide_as_one(runs):
    split, one = runs["split"], runs["skip"]
    assert split.codes == [0, 0]
    assert split.spikes() == POISONED
    for mine, its in zip(split.records(), one.records(), strict=True):
        if mine["step"] <= 44:  # up to 40 these are one rank's own; rounding differences grow
            assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)
            assert mine["update_norm"] == pytest.approx(its["update_norm"], rel=1e-3)


def test_a_rewind_goes_on_after_the_spike(runs):
    rewind = runs["rewind"]
    (event,) = rewind.records("rewind")
    places = ("step", "checkpoint_step", "spike_step", "first_skipped", "last_skipped", "action", "signal")
    assert [event[name] for name in places] == [40, 40, 45, LEFT_OUT[0], LEFT_OUT[-1], "rewind", "loss"]
    assert [record["last_step"] for record in rewind.records("skipped_batches")] == [LEFT_OUT[-1]]
    assert not {*rewind.losses()} & {*LEFT_OUT}
    dropped = read_records(rewind.folder / "metrics_rewound.jsonl")
    assert [record["step"] for record in dropped if record.get("event") == "spike"] == [45, 46, 47]
    assert rewind.records()[-1]["step"] == STEPS
    assert rewind.records()[-1]["tokens"] == (STEPS - len(LEFT_OUT)) * 4 * 64


def test_a_rewind_is_a_restart_that_leaves_out_the_same_batches(runs):
    rewind, restart = runs["rewind"], runs["restart"]
    assert restart.codes == [0]
    counts = ("rewinds", "spikes", "spikes_per_100k_steps")
    assert rewind.numbers(40, *counts) == restart.numbers(40, *counts)
    assert [run.records()[-1]["spikes"] for run in (rewind, restart)] == [2, 1]
    assert [record["step"] for record in restart.records()][-2:] == [55, 56]


@pytest.mark.nightly
def test_a_run_killed_after_a_rewind_knows_of_it(runs):
    assert runs["rewind, resumed"].numbers(40) == runs["rewind"].numbers(40)


def test_stop_ends_with_its_own_code_and_nothing_bad_saved(runs):
    stop = runs["stop"]
    assert stop.codes == [STOPPED_BY_MONITOR]
    assert "3 steps in a row (monitor.action = stop). Nothing was saved after step 40" in stop.log
    assert stop.checkpoints == ["step_00000040"]
    assert max(stop.losses()) == 45  # the spike's third step is read at step 49
    assert [record["step"] for record in stop.records("stop")] == [49]


def test_the_same_command_does_not_run_into_the_same_spike(runs):
    stop, again, restart = runs["stop"], runs["stop, again"], runs["restart"]
    assert again.codes == [STOPPED_BY_MONITOR]
    assert "the monitor stopped this run" in again.log
    assert "train.iterations_to_skip=[45,46,47]\n" in again.log
    assert again.numbers(0) == stop.numbers(0)  # unchanged
    assert [(run.folder / "monitor_stop.json").exists() for run in (stop, again, restart)] == [1, 1, 0]


def test_the_learning_rate_is_lowered_for_a_while(runs):
    lower = runs["lower_lr"]
    assert [(record["step"], record["last"]) for record in lower.records("lower_lr")] == [(47, 53)]
    rates = {record["step"]: record["lr"] for record in lower.records()}
    assert [rates[step] for step in range(11, STEPS + 1)] == [2e-3] * 39 + [1e-3] * 6 + [2e-3]
