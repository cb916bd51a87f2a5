"""A `Run` in this process, with nothing around it: no launcher, no folder, no watch."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from gsa_train.config import Config
from gsa_train.model.build import Model
from gsa_train.trainer import Run
from helpers.single_rank import single_rank


def tiny_run(config: Config, model: Model, **fields: Any) -> Run:
    """Saves nothing, is never asked to stop and logs into the void, unless `fields` say otherwise."""
    defaults = {
        "batches": Mock(state=dict),
        "validation_sets": [],
        "tokenizer": Mock(),
        "saver": Mock(is_due=lambda step: False, ended=lambda now: []),
        "sinks": Mock(),
        "progress": Mock(),
        "wandb_run_id": None,
        "stop_vote": Mock(ask=lambda: 0),
        "watch": Mock(),
        "profiler": Mock(),
        "straggler_warning": Mock(),
    }
    return Run(config=config, parallel=single_rank(), model=model, **{**defaults, **fields})
