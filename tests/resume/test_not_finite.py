"""Tests a NaN in weights or optimizer state: no checkpoint contains it, and the last good one stays.

The run ends with exit code 13 or goes back. No start or rewind uses such a checkpoint of an earlier version.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gsa_train.checkpoint.files import faults_in, read_manifest
from gsa_train.metrics.record_format import read_records
from gsa_train.process.exit_codes import REFUSED, STOPPED_BY_MONITOR
from helpers.fault_plans import FaultPlan
from helpers.tiers import chosen, runs_nightly, with_nightly

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 64},
    "gsa": {"indexer_heads": 2, "indexer_dim": 16, "k_base": 16, "k_min": 8, "k_max": 32},
    "train": {"seq_len_tokens": 64, "micro_batch_size": 2, "global_batch_size": 4},
    "evaluate": {"every_steps": 0, "max_blocks": 1, "ngram_baselines": False},
    "checkpoint": {"every_steps": 3, "keep_last": 1},
    "logging": {"every_steps": 1, "wandb": "disabled", "tensorboard": False, "plots": False},
    "monitor": {"patience_steps": 1, "rewind_min_steps": 1, "max_rewinds": 1},
}
PHASES = [{"name": "sparse", "steps": 9, "lr": 2e-3}]
REWIND, BF16 = "monitor.action=rewind", "train.precision=bf16"
SKIPS = ("monitor.rewind_skip_before_steps=0", "monitor.rewind_skip_after_steps=0")
KEEP = "checkpoint.keep_last=9"
FROZEN = ("phases.0.train=indexer", "phases.0.attention=dense")
ZERO = ("parallel.strategy=deepspeed", "parallel.zero_stage=3", BF16)
COPIES = "parallel.distributed_optimizer=false"
"""Each rank has all weights and moments, and writes half of them."""

STOPS: dict[str, tuple[tuple[str, ...], int, tuple[int, int, str], str]] = {
    # Fields: name: overrides, ranks, step and rank and place of the NaN, text of the last line.
    "gradient": ((), 1, (5, 0, "gradient"), "the gradient norm is nan"),
    "moment before a save": ((), 1, (5, 0, "moment"), "1 of 4096 in exp_avg of decoder.layers.0."),
    "moment at a save": ((), 1, (6, 0, "moment"), "1 of 4096 in exp_avg of decoder.layers.0."),
    "weight before a save": ((), 1, (5, 0, "weight"), "the loss is nan"),
    "weight at a save": ((), 1, (6, 0, "weight"), "1 of 4096 in decoder.layers.0.mlp.linear_fc2"),
    "fp32 weight at a save": ((BF16,), 1, (6, 0, "fp32 weight"), "in fp32 weight of decoder"),
    "frozen weight at a save": (FROZEN, 1, (6, 0, "weight"), "1 of 4096 in decoder.layers.0.mlp"),
    "unread weight before a save": ((), 1, (4, 0, "unread weight"), "in embedding.word_embeddings"),
    "average at a save": ((), 1, (6, 0, "average"), "variance.ema"),
    "weight at the last step": ((), 1, (9, 0, "weight"), "1 of 4096 in decoder.layers.0.mlp"),
    "second moment at the last step": ((), 1, (9, 0, "second moment"), "in exp_avg_sq of decoder"),
    "weight of one replica": ((COPIES,), 2, (6, 1, "weight"), "(rank 1: 1 of 4096 in decoder"),
    "moment of one replica": ((COPIES,), 2, (6, 1, "moment"), "(rank 1: 1 of 4096 in exp_avg"),
    "moment of one part": ((), 2, (6, 1, "moment"), "(rank 1: 1 of "),
    "fp32 weight of one part": (ZERO, 2, (6, 1, "fp32 weight"), "(rank 1: 1 of 2048 in fp32 weight"),
}
DAY = {
    "gradient",
    "moment at a save",
    "fp32 weight at a save",
    "weight at the last step",
    "moment of one part",
}


@dataclass
class Finished:
    folder: Path
    codes: list[int]

    @property
    def log(self) -> str:
        return self.folder.with_suffix(".log.0").read_text()

    @property
    def checkpoints(self) -> list[str]:
        names = {path.name for path in (self.folder / "checkpoints").iterdir() if path.is_dir()}
        return sorted(names)

    @property
    def latest(self) -> str:
        return (self.folder / "checkpoints" / "latest").read_text()

    @property
    def events(self) -> list[tuple[str, int]]:
        told = ("checkpoint_failed", "checkpoint_damaged", "rewind", "stop")
        records = read_records(self.folder / "metrics.jsonl")
        return [(each["event"], each["step"]) for each in records if each.get("event") in told]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("not_finite")
    plan = FaultPlan(folder, SECTIONS, PHASES)
    run = plan.run
    wanted = {*chosen(request, test_the_run_stops_and_the_last_good_checkpoint_stays.__name__), *DAY}
    stops = [
        run(name, *given, ranks=ranks, nan_in=[step, rank, place])
        for name, (given, ranks, (step, rank, place), _) in STOPS.items()
        if name in wanted
    ]
    old = partial(run, unchecked_saves=True)  # as with an earlier version
    waves = [stops[number : number + 2] for number in range(0, len(stops), 2)] + [
        [
            run("rewound", REWIND, *SKIPS, KEEP, nan_in=[6, 0, "moment"]),
            old("old", KEEP, nan_in=[9, 0, "unread weight"]),
        ],
    ]
    if runs_nightly(request):
        waves += [
            [old("rewound past it", REWIND, *SKIPS, KEEP, nan_in=[6, 0, "moment"])],
            [
                run("initial", f"checkpoint.initial_weights={folder / 'old'}"),
                run("by name", "--resume-from", str(folder / "old")),
            ],
        ]
    waves += [
        [
            run("old, again", "run.name=old", KEEP) | {"log": str(folder / "old.log")},
            run("stopped, again", "run.name=weight at the last step"),
        ],
    ]
    codes = plan.carry_out(waves)
    found = {name: Finished(folder / name, of_run) for name, of_run in codes.items()}
    found["old, again"].folder = folder / "old"
    return found


@pytest.mark.parametrize("name", with_nightly(STOPS, STOPS.keys() - DAY))
def test_the_run_stops_and_the_last_good_checkpoint_stays(runs: dict[str, Finished], name: str) -> None:
    run, (_, ranks, (step, *_), said) = runs[name], STOPS[name]
    assert run.codes == [STOPPED_BY_MONITOR] * ranks
    assert said in run.log.splitlines()[-1]
    kept = "step_00000006" if step == 9 else "step_00000003"
    assert (run.checkpoints, run.latest) == ([kept], kept)
    checkpoint = run.folder / "checkpoints" / kept
    assert not faults_in(checkpoint, read_manifest(checkpoint).files, checksums=True)
    assert not (run.folder / "summary.json").exists()
    assert json.loads((run.folder / "monitor_stop.json").read_text())["saved_step"] == int(kept[-1])


def test_the_same_command_is_refused_and_says_what_to_do(runs: dict[str, Finished]) -> None:
    again = runs["stopped, again"]
    assert again.codes == [STOPPED_BY_MONITOR]
    assert "--resume-after-stop" in again.log
    assert "train.iterations_to_skip" not in again.log  # no batch is known as the cause


def test_a_run_that_may_rewind_goes_back_and_on_to_its_end(runs: dict[str, Finished]) -> None:
    rewound = runs["rewound"]
    assert rewound.codes == [0]
    assert rewound.events == [("rewind", 3)]
    assert rewound.latest == "step_00000009"


@pytest.mark.nightly
def test_a_rewind_passes_over_a_checkpoint_that_is_not_finite(runs: dict[str, Finished]) -> None:
    rewound = runs["rewound past it"]
    assert rewound.codes == [0]
    assert rewound.events == [("rewind", 3), ("checkpoint_damaged", 3)]
    assert "step_00000006 is damaged: values that are not finite (rank 0: 1 of 4096 in exp_avg" in rewound.log
    names = ("step_00000003", "step_00000006", "step_00000006.damaged", "step_00000009")
    assert rewound.checkpoints == [*names]


def test_a_start_passes_over_it_too(runs: dict[str, Finished]) -> None:
    assert runs["old"].codes == [0]
    again = runs["old, again"]
    assert again.codes == [0]
    assert ("checkpoint_damaged", 6) in again.events
    assert "step_00000009.damaged" in again.checkpoints
    assert "step_00000009" in again.checkpoints  # trained again


@pytest.mark.nightly
def test_nor_does_a_run_that_is_told_to(runs: dict[str, Finished]) -> None:
    initial = runs["initial"]
    assert initial.codes == [REFUSED]
    assert "has values that are not finite (rank 0: 1 of " in initial.log
    by_name = runs["by name"]
    assert by_name.codes == [REFUSED]
    assert "step_00000009 is damaged: values that are not finite (rank 0: 1 of " in by_name.log
    assert not initial.folder.exists()
    assert not by_name.folder.exists()
