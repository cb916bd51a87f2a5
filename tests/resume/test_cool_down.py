"""Tests two kinds of cool-downs: a new run that starts from a checkpoint, and a later phase that keeps the optimizer.
Both must equal a single phase whose schedule contains the cool-down."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.runs import CONFIG, REPOSITORY, Run, kill, start, train

pytestmark = pytest.mark.slow

FALL = {"decay": "wsd", "decay_steps": 4, "decay_shape": "1-sqrt"}
PEAK = {"name": "peak", "steps": 6, "decay": "constant", "warmup_steps": 2}
COOL_DOWN = {"name": "cool-down", "steps": 4, **FALL}
FOLLOWS = {**COOL_DOWN, "keep_optimizer": True}
PLANNED = {"name": "planned", "steps": 10, "warmup_steps": 2, **FALL}


def config_of(folder: Path, *phases: dict[str, Any]) -> str:
    config = yaml.safe_load((REPOSITORY / CONFIG).read_text())
    shared = {"attention": "sparse", "train": "all", "lr": 1e-3, "min_lr": 1e-4, "indexer_lr_mult": 1.0}
    path = folder / f"{'-'.join(phase['name'] for phase in phases)}.yaml"
    path.write_text(yaml.safe_dump({**config, "phases": [{**shared, **phase} for phase in phases]}))
    return str(path)


def weights_and_state(run: Run) -> dict[str, str]:
    """Return the checksums of the last checkpoint's files with tensors."""
    files = (run.checkpoints / run.latest).glob("*.distcp")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def numbers(run: Run, last: int) -> list[tuple[Any, ...]]:
    """Return the numbers of the last steps and the final validation that depend on weights and moments."""
    keys = ("loss", "indexer_kl", "grad_norm", "update_norm", "lr", "layer_variance_ema")
    steps = [tuple(str(step[key]) for key in keys) for step in run.steps()[-last:]]
    found = [each["validation_loss"] for each in run.records() if each.get("event") == "validation"]
    return [*steps, (found[-1],)]


OPTIONS = [
    (),
    ("train.precision=bf16", "train.optimizer=muon"),
    ("train.precision=bf16", "parallel.strategy=deepspeed"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["as the config", "bf16 with Muon", "bf16 with ZeRO"])
def test_a_cool_down_from_a_checkpoint_and_one_in_a_phase_equal_the_planned_one(
    tmp_path: Path, options
) -> None:
    shared = (*options, "checkpoint.every_steps=3")
    planned = train(tmp_path, *shared, config=config_of(tmp_path, PLANNED), name="planned")
    peak = train(tmp_path, *shared, config=config_of(tmp_path, PEAK), name="peak")
    continued = (*shared, f"checkpoint.initial_weights={peak.folder}", "checkpoint.initial_state=continue")
    cool_down = train(tmp_path, *continued, config=config_of(tmp_path, COOL_DOWN), name="cool-down")
    in_phase = train(tmp_path, *shared, config=config_of(tmp_path, PEAK, FOLLOWS), name="phase")

    expected = numbers(planned, 4)
    assert len(expected) == 5
    assert weights_and_state(cool_down) == weights_and_state(in_phase) == weights_and_state(planned) != {}
    assert numbers(cool_down, 4) == expected
    assert numbers(in_phase, 4) == expected

    if not options:
        fresh = (*continued, "checkpoint.initial_state=fresh")
        other = train(tmp_path, *fresh, config=config_of(tmp_path, COOL_DOWN), name="fresh")
        assert numbers(other, 4) != expected


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.nightly)])
def test_a_kill_at_the_boundary_and_another_number_of_ranks_change_nothing(
    optimizer: str, tmp_path: Path
) -> None:
    both = config_of(tmp_path, PEAK, FOLLOWS)
    shared = ("checkpoint.every_steps=3", f"train.optimizer={optimizer}")
    planned = train(tmp_path, *shared, config=config_of(tmp_path, PLANNED), name="planned")
    killed = start(tmp_path, *shared, "checkpoint.async_save=false", config=both, name="killed")
    killed.wait_until(lambda: killed.latest == "step_00000006")
    kill(killed)
    boundary = ("--resume-from", str(killed.checkpoints / "step_00000006"))
    resumed = train(tmp_path, *shared, *boundary, config=both, name="resumed")
    assert resumed.series("step") == [7, 8, 9, 10]
    assert numbers(resumed, 4) == numbers(planned, 4)

    inside = ("--resume-from", str(planned.checkpoints / "step_00000009"))
    repeated = train(tmp_path, *shared, *inside, config=config_of(tmp_path, PLANNED), name="inside the decay")
    assert repeated.series("step") == [10]
    assert numbers(repeated, 1) == numbers(planned, 1)

    continued = (f"checkpoint.initial_weights={killed.checkpoints / 'step_00000006'}",)
    continued += ("checkpoint.initial_state=continue",)
    two = train(tmp_path, *shared, *continued, config=config_of(tmp_path, COOL_DOWN), name="two", ranks=2)
    assert two.series("loss") == pytest.approx(planned.series("loss")[6:], rel=1e-5)
    assert two.series("lr") == planned.series("lr")[6:]
