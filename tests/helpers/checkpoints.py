"""Writes checkpoints of small models in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gsa_train.checkpoint.load import RunState
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config, config_to_yaml
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer
from helpers.single_rank import CONFIG, single_rank


def run_state(
    step: int, config: Config = CONFIG, layout: tuple[int, int, int, int] = (1, 1, 1, 1)
) -> RunState:
    """Return the state of a run that has taken `step` steps in its one phase."""
    return RunState(
        step=step,
        tokens=64 * step,
        phase_index=0,
        phase_name=config.phases[0].name,
        phase_start=0,
        data={"consumed_samples": 4 * step, "tokenizer_fingerprint": None},
        wandb_run_id="abc",
        config_yaml=config_to_yaml(config),
        layout=layout,
        rng=[],
    )


def write_checkpoint(
    checkpoints: Path, step: int, model: Model, optimizer: PhaseOptimizer, config: Config, **fields: Any
) -> Path:
    """Write a durable checkpoint and return its folder; `fields` override fields of `run_state`."""
    saver = CheckpointSaver(checkpoints, CheckpointConfig(async_save=False), single_rank())
    state = replace(run_state(step, config), run=config.run.name, **fields)
    (result,) = saver.begin(state, model, optimizer)
    saver.close()
    assert result.error is None, result.error
    return result.folder
