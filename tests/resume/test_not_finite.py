"""Tests a NaN in weights or optimizer state. No checkpoint may contain the NaN, and the last good checkpoint stays.

The run ends with exit code 13. A NaN in a checkpoint of an earlier version is never used.
"""

import json
from functools import partial
from typing import Any

import pytest

from gsa_train.checkpoint.files import faults_in, read_manifest
from gsa_train.process.exit_codes import REFUSED, STOPPED_BY_MONITOR
from helpers.runs import Run, demo_config, start, wait_for
from helpers.tiers import chosen, runs_nightly, with_nightly

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 64},
    "gsa": {"indexer_heads": 2, "indexer_dim": 16, "k_base": 16, "k_min": 8, "k_max": 32},
    "train": {"seq_len_tokens": 64, "micro_batch_size": 2, "global_batch_size": 4},
    "evaluate": {"every_steps": 0, "max_blocks": 1, "ngram_baselines": False},
    "checkpoint": {"every_steps": 3, "keep_last": 1},
    "logging": {"every_steps": 1, "wandb": "disabled", "tensorboard": False},
    "monitor": {"patience_steps": 1},
}
PHASES = [{"name": "sparse", "steps": 9, "lr": 2e-3}]
BF16 = "train.precision=bf16"
KEEP = "checkpoint.keep_last=9"
FROZEN = ("phases.0.train=indexer", "phases.0.attention=dense")
ZERO = ("parallel.strategy=deepspeed", "parallel.zero_stage=3", BF16)
COPIES = "parallel.distributed_optimizer=false"
"""Each rank has all weights and moments, and writes half of them."""

STOPS: dict[str, tuple[tuple[str, ...], int, list[Any], str]] = {
    # Fields: name: overrides, ranks, step and rank and place of the NaN, text of the last line.
    "gradient": ((), 1, [5, 0, "gradient"], "the gradient norm is nan"),
    "moment before a save": ((), 1, [5, 0, "moment"], "1 of 4096 in exp_avg of decoder.layers.0."),
    "moment at a save": ((), 1, [6, 0, "moment"], "1 of 4096 in exp_avg of decoder.layers.0."),
    "weight before a save": ((), 1, [5, 0, "weight"], "the loss is nan"),
    "weight at a save": ((), 1, [6, 0, "weight"], "1 of 4096 in decoder.layers.0.mlp.linear_fc2"),
    "fp32 weight at a save": ((BF16,), 1, [6, 0, "fp32 weight"], "in fp32 weight of decoder"),
    "frozen weight at a save": (FROZEN, 1, [6, 0, "weight"], "1 of 4096 in decoder.layers.0.mlp"),
    "unread weight before a save": ((), 1, [4, 0, "unread weight"], "in embedding.word_embeddings"),
    "average at a save": ((), 1, [6, 0, "average"], "variance.ema"),
    "weight at the last step": ((), 1, [9, 0, "weight"], "1 of 4096 in decoder.layers.0.mlp"),
    "second moment at the last step": ((), 1, [9, 0, "second moment"], "in exp_avg_sq of decoder"),
    "weight of one replica": ((COPIES,), 2, [6, 1, "weight"], "(rank 1: 1 of 4096 in decoder"),
    "moment of one replica": ((COPIES,), 2, [6, 1, "moment"], "(rank 1: 1 of 4096 in exp_avg"),
    "moment of one part": ((), 2, [6, 1, "moment"], "(rank 1: 1 of "),
    "fp32 weight of one part": (ZERO, 2, [6, 1, "fp32 weight"], "(rank 1: 1 of 2048 in fp32 weight"),
}
DAY = {
    "gradient", "moment at a save", "fp32 weight at a save", "weight at the last step", "moment of one part",
}  # fmt: skip


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())


def events(run: Run) -> list[tuple[str, int]]:
    told = ("checkpoint_failed", "checkpoint_damaged", "stop")
    return [(each["event"], each["step"]) for each in run.records() if each.get("event") in told]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("not_finite")
    config = demo_config(folder, SECTIONS, PHASES)

    def run(name: str, *overrides: str, ranks: int = 1, **faults: Any) -> Run:
        return start(folder, *overrides, config=config, name=name, ranks=ranks, faults=faults)

    def stopped(name: str) -> tuple[Run, int]:
        overrides, ranks, place, _ = STOPS[name]
        return run(name, *overrides, ranks=ranks, nan_in=place), STOPPED_BY_MONITOR

    names = [*{*chosen(request, test_the_run_stops_and_the_last_good_checkpoint_stays.__name__), *DAY}]
    found: dict[str, Run] = {}
    for number in range(0, len(names), 2):
        found |= wait_for(*map(stopped, names[number : number + 2]))
    old = partial(run, unchecked_saves=True)  # as with an earlier version
    found |= wait_for((old("old", KEEP, nan_in=[9, 0, "unread weight"]), 0))
    if runs_nightly(request):
        found |= wait_for(
            (run("initial", f"checkpoint.initial_weights={folder / 'old'}"), REFUSED),
            (run("by name", "--resume-from", str(folder / "old")), REFUSED),
        )
    again = {"old, again": run("old", KEEP), "stopped, again": run("weight at the last step")}
    wait_for((again["old, again"], 0), (again["stopped, again"], STOPPED_BY_MONITOR))
    return found | again


@pytest.mark.parametrize("name", with_nightly(STOPS, STOPS.keys() - DAY))
def test_the_run_stops_and_the_last_good_checkpoint_stays(runs: dict[str, Run], name: str) -> None:
    run, (_, _, (step, *_), said) = runs[name], STOPS[name]
    assert said in run.output.splitlines()[-1]
    kept = "step_00000006" if step == 9 else "step_00000003"
    assert (folders(run), run.latest) == ([kept], kept)
    checkpoint = run.checkpoints / kept
    assert not faults_in(checkpoint, read_manifest(checkpoint).files, checksums=True)
    assert not (run.folder / "summary.json").exists()
    assert json.loads((run.folder / "monitor_stop.json").read_text())["saved_step"] == int(kept[-1])


def test_the_same_command_is_refused_and_says_what_to_do(runs: dict[str, Run]) -> None:
    again = runs["stopped, again"]
    assert "--resume-after-stop" in again.output
    assert "train.iterations_to_skip" not in again.output  # no batch is known as the cause


def test_a_start_passes_over_it_too(runs: dict[str, Run]) -> None:
    again = runs["old, again"]
    assert ("checkpoint_damaged", 6) in events(again)
    assert "step_00000009.damaged" in folders(again)
    assert "step_00000009" in folders(again)  # trained again


@pytest.mark.nightly
def test_nor_does_a_run_that_is_told_to(runs: dict[str, Run]) -> None:
    initial = runs["initial"]
    assert "has values that are not finite (rank 0: 1 of " in initial.output
    by_name = runs["by name"]
    assert "step_00000009 is damaged: values that are not finite (rank 0: 1 of " in by_name.output
    assert not initial.folder.exists()
    assert not by_name.folder.exists()
