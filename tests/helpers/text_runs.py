"""Trains a tiny model on the bundled text in this process, with saves, stops and resumes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch

from gsa_data.tokenize import Tokenizer
from gsa_train.checkpoint.load import load_checkpoint, read_run_state
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import TrainBatches, read_validation_sets
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.reliability.monitor.monitor import MonitorStop, state_of
from gsa_train.reliability.stop_signals import Stopped
from gsa_train.run.state import Run
from gsa_train.trainer import run_phase
from gsa_train.validation.tasks import TaskClock
from helpers.single_rank import named_weights, single_rank, tiny_config, tiny_model
from helpers.tiny_run import tiny_run

SAMPLE = Path(__file__).parents[2] / "data" / "sample"


def text_config(phases: Sequence[PhaseConfig], **sections: Any) -> Config:
    """Return a config that reads the bundled text and logs each step."""
    data = {"train_dir": str(SAMPLE / "train"), "validation_dir": str(SAMPLE / "validation"), "num_lanes": 1}
    data["tokenizer"] = str(SAMPLE / "tokenizer.model")
    defaults = {"data": data, "model": {"vocab_size": 4096}, "logging": {"every_steps": 1}}
    return tiny_config([*phases], **defaults | sections)


def train_on_text(
    config: Config, folder: Path, resume_from: Path | None = None, **fields: Any
) -> tuple[list[dict[str, Any]], Run, BaseException | None]:
    """Train the config's first phase, from the checkpoint `resume_from` if given. Return its records except records of
    saves, the run, and what ended the run. `fields` go to `tiny_run`."""
    torch.manual_seed(1)
    phase_range = phase_ranges(config.phases)[0]
    tokenizer, state = Tokenizer(config.data.tokenizer), None
    model = tiny_model(config, variance_ema=0.02)
    optimizer = build_optimizer(model, phase_range.phase, config)
    if resume_from is not None:
        state = read_run_state(resume_from)
        load_checkpoint(resume_from, model, optimizer, single_rank(), with_optimizer=True)
        names = ("step", "tokens", "validation_due", "tasks_due")
        fields |= {name: getattr(state, name) for name in names}
        fields |= {"monitor": state_of(state.monitor), "task_clock": TaskClock(**state.task_clock)}
    records: list[dict[str, Any]] = []
    run = tiny_run(
        config,
        model,
        batches=TrainBatches(config, single_rank(), tokenizer, state.data if state else None),
        validation_sets=read_validation_sets(config, tokenizer),
        tokenizer=tokenizer,
        saver=CheckpointSaver(folder, config.checkpoint, single_rank()),
        sinks=Mock(log=records.append),
        **fields,
    )
    ended_by: BaseException | None = None
    try:
        run_phase(run, phase_range, optimizer)
    except (Stopped, MonitorStop) as error:
        ended_by = error
    finally:
        close_optimizer(model, optimizer)
        run.services.saver.close()
    return [each for each in records if not each.get("event", "").startswith("checkpoint")], run, ended_by


TIMING = ("seconds", "per_second", "data_wait", "slowest", "time", "mfu")


def left_by(run: Run, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what two runs that train the same have in common to the last bit."""
    kept = [
        {name: each[name] for name in each if not any(word in name for word in TIMING)} for each in records
    ]
    return {
        "records": kept,
        "weights": named_weights(run.model),
        "averages": [a.variance.ema.item() for a in run.model.attentions if a.variance is not None],
        "rng": torch.get_rng_state(),
        "data": run.data.batches.state(),
    }


def assert_trained_alike(found: dict[str, Any], wanted: dict[str, Any], but: str) -> None:
    """Compare two runs to the last bit, but ignore the first run's events named `but`."""
    assert [each for each in found["records"] if each.get("event") != but] == wanted["records"]
    assert (found["averages"], found["data"]) == (wanted["averages"], wanted["data"])
    assert torch.equal(found["rng"], wanted["rng"])
    for name, weight in wanted["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


def of_event(result: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [record for record in result["records"] if record.get("event") == event]
