"""Writes checkpoints of small models in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gsa_data.tokenize import Tokenizer
from gsa_train.checkpoint.load import RunState
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config, config_to_yaml
from gsa_train.data.tokenizer import companions_of
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
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
    checkpoints: Path,
    step: int,
    model: Model,
    optimizer: PhaseOptimizer | None,
    config: Config,
    tokenizer: Tokenizer | None = None,
    parallel: Parallel | None = None,
    **fields: Any,
) -> Path:
    """Write a durable checkpoint and return its folder; `fields` override fields of `run_state`.

    Args:
        optimizer: the optimizer to save; None: a new one for the first phase.
        tokenizer: if given, its file and the chat template are copied into the checkpoint, as in a run.
    """
    own = optimizer or build_optimizer(model, config.phases[0], config)
    parallel = parallel or single_rank()
    files = {tokenizer.file_name: tokenizer.file, **companions_of(config).files()} if tokenizer else {}
    saver = CheckpointSaver(checkpoints, CheckpointConfig(async_save=False), parallel, small_files=files)
    state = run_state(step, config, parallel.layout)
    (result,) = saver.begin(replace(state, run=config.run.name, **fields), model, own)
    saver.close()
    if optimizer is None:
        close_optimizer(model, own)
    assert result.error is None, result.error
    return result.folder
