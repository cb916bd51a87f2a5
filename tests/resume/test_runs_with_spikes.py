"""Tests spikes in real runs: the steps of detection, the actions, and the final state."""

import shutil
from typing import Any

import pytest

from gsa_train.process.exit_codes import STOPPED_BY_MONITOR
from helpers.runs import Run, demo_config, numbers_of, start, wait_for
from helpers.tiers import runs_nightly

pytestmark = pytest.mark.slow

STEPS = 56
SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 128},
    "gsa": {"indexer_heads": 2, "indexer_dim": 16, "k_base": 16, "k_min": 8, "k_max": 32},
    "train": {"seq_len_tokens": 64, "micro_batch_size": 4, "global_batch_size": 4},
    "evaluate": {"every_steps": 0, "max_blocks": 8, "ngram_baselines": False},
    "checkpoint": {"every_steps": 40, "keep_last": 9},
    "logging": {"every_steps": 1, "wandb": "disabled", "tensorboard": False},
    # So early in the training of so small a model, the gradient norm sometimes triples.
    "monitor": {"window_steps": 40, "min_history_steps": 24, "grad_norm_min_ratio": 5.0},
}
PHASE = {"name": "sparse", "steps": STEPS, "lr": 2e-3, "min_lr": 2e-3, "warmup_steps": 10}

TEXT = {"random_tokens": [[33, 33], [45, 49]]}
"""One batch of uniformly random tokens, and five of them; the checkpoint is in between."""
POISONED = [33, 45, 46, 47, 48, 49]
EVERY_FIFTH = "logging.every_steps=5"
"""The host reads verdicts when they are READ_DELAY_STEPS old, or at a logged step."""
LEFT_OUT = list(range(43, 52))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Run all runs of this file, two of one rank in parallel."""
    folder = tmp_path_factory.mktemp("spikes")
    config = demo_config(folder, SECTIONS, [PHASE])

    def run(name: str, *overrides: str, ranks: int = 1, **faults: Any) -> Run:
        return start(folder, *overrides, config=config, name=name, ranks=ranks, faults=faults)

    def goes_on(name: str, source: str, *overrides: str, ranks: int = 1, **faults: Any) -> Run:
        """Resume from a copy of a run's folder, as after a kill between its checkpoint and the end."""
        shutil.copytree(folder / source, folder / name)
        (folder / name / "checkpoints" / "latest").write_text("step_00000040")
        shutil.rmtree(folder / name / "checkpoints" / f"step_{STEPS:08d}", ignore_errors=True)
        return run(name, *overrides, ranks=ranks, **(faults or TEXT))

    skip, stop = (f"monitor.action={action}" for action in ("skip", "stop"))
    left_out = f"train.iterations_to_skip={LEFT_OUT}"
    # Up to step 40 `stop` would equal `skip`.
    found = {
        **wait_for((run("clean"), 0), (run("skip", skip, **TEXT), 0)),
        **wait_for((goes_on("stop", "skip", stop, EVERY_FIFTH), STOPPED_BY_MONITOR)),
        **wait_for(
            (goes_on("skip, resumed", "skip", skip), 0),
            (goes_on("restart", "stop", stop, EVERY_FIFTH, left_out), 0),
        ),
        **wait_for((goes_on("stop, again", "stop", stop, EVERY_FIFTH), STOPPED_BY_MONITOR)),
    }
    if runs_nightly(request):
        nan = {"nan_in": [44, 1, "gradient"]}
        found |= wait_for((goes_on("nan", "clean", skip, "train.micro_batch_size=2", ranks=2, **nan), 0))
        found |= wait_for((goes_on("split", "skip", skip, "parallel.tensor=2", ranks=2), 0))
    return found


def spikes(run: Run) -> list[int]:
    return [record["step"] for record in run.events("spike")]


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.steps()}


def numbers(run: Run, after: int, *without: str) -> list[dict[str, Any]]:
    """Return every record after a step, except saves, times and the named keys."""
    return numbers_of((record for record in run.records() if record["step"] > after), keys=without)


def test_without_faults_nothing_happens(runs):
    clean = runs["clean"]
    assert not spikes(clean)
    last = clean.steps()[-1]
    counts = ("spikes", "spikes_per_100k_steps", "skipped_updates")
    assert [last[name] for name in counts] == [0, 0, 0]
    assert all(record["update_norm"] > 0 for record in clean.steps())


def test_updates_from_bad_batches_are_left_out_at_once(runs):
    skip, clean = runs["skip"], runs["clean"]
    assert spikes(skip) == POISONED
    assert {record["action"] for record in skip.events("spike")} == {"skip"}
    assert [record["step"] for record in skip.steps() if record["update_norm"] == 0] == POISONED
    assert all(losses(skip)[step] == losses(clean)[step] for step in range(1, 33))
    last = skip.steps()[-1]
    assert (last["spikes"], last["skipped_updates"], last["spikes_per_100k_steps"]) == (2, 6, 2e5 / STEPS)


def test_a_run_resumed_between_two_spikes_is_the_uninterrupted_one(runs):
    assert numbers(runs["skip, resumed"], 0) == numbers(runs["skip"], 0)


@pytest.mark.nightly
def test_two_ranks_decide_as_one(runs):
    split, one = runs["split"], runs["skip"]
    assert spikes(split) == POISONED
    for mine, its in zip(split.steps(), one.steps(), strict=True):
        if mine["step"] <= 44:  # up to 40 these are one rank's own; rounding differences grow
            assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)
            assert mine["update_norm"] == pytest.approx(its["update_norm"], rel=1e-3)


def test_stop_ends_with_its_own_code_and_nothing_bad_saved(runs):
    stop = runs["stop"]
    assert "3 steps in a row (monitor.action = stop). Nothing was saved after step 40" in stop.output
    assert [path.name for path in stop.checkpoints.glob("step_*")] == ["step_00000040"]
    assert max(losses(stop)) == 45  # the spike's third step is read at step 49
    assert [record["step"] for record in stop.events("stop")] == [49]


def test_the_same_command_does_not_run_into_the_same_spike(runs):
    stop, again, restart = runs["stop"], runs["stop, again"], runs["restart"]
    assert "the monitor stopped this run" in again.output
    assert "train.iterations_to_skip=[45,46,47]\n" in again.output
    assert numbers(again, 0) == numbers(stop, 0)  # unchanged
    assert [(run.folder / "monitor_stop.json").exists() for run in (stop, again, restart)] == [1, 1, 0]


@pytest.mark.nightly
def test_a_nan_on_one_rank_costs_one_update(runs):
    nan = runs["nan"]
    (event,) = nan.events("spike")
    assert (event["step"], event["signal"], str(event["value"])) == (44, "grad_norm", "nan")
    assert [record["step"] for record in nan.steps() if record["update_norm"] == 0] == [44]


def test_a_restart_leaves_out_the_batches_that_it_is_told_to(runs):
    restart = runs["restart"]
    assert not {*losses(restart)} & {*LEFT_OUT}
    assert [record["last_step"] for record in restart.events("skipped_batches")] == [LEFT_OUT[-1]]
    assert [record["step"] for record in restart.steps()][-2:] == [55, 56]
    assert restart.steps()[-1]["tokens"] == (STEPS - len(LEFT_OUT)) * 4 * 64
