"""Creates a `Run` in this process without launcher, folder or watchdog."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import MagicMock, Mock

from gsa_train.config import Config
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.model.mcore.build import Model
from gsa_train.run.run_log import RunLog
from gsa_train.run.state import Data, Run, Services, TrainState
from gsa_train.run_folder.resume import Start
from gsa_train.train import services_of
from helpers.single_rank import random_batches, single_rank


def tiny_run(config: Config, model: Model, **fields: Any) -> Run:
    """Return a run that trains on random tokens. It saves and logs nothing, and is never asked to stop. Each value in
    `fields` replaces the field of the same name in `Run` or in one of its parts."""
    text = {"next_step": lambda step: random_batches(config), "wait_seconds": 0.0, "counters": {}}
    defaults = {
        "batches": Mock(state=dict, checksum=lambda: 0, **text),
        "validation_sets": [],
        "tokenizer": Mock(),
        "saver": Mock(is_due=lambda step: False, ended=lambda now: [], take_held_seconds=lambda: 0.0),
        "sinks": Mock(),
        "console": Mock(),
        "wandb_run_id": None,
        "stop_vote": Mock(ask=lambda: 0),
        "watchdog": MagicMock(),
        "profiler": Mock(),
        "goodput": GoodputLog(RunClock()),
        "start": Start(),
    }
    values = {**defaults, **fields}

    def take(level: Any) -> Any:
        names = [each.name for each in dataclasses.fields(level)]
        return level(**{name: values.pop(name) for name in names if name in values})

    held = {"data": take(Data), "state": take(TrainState), "log": take(RunLog)}
    values["log"] = held.pop("log")
    run = Run(config=config, parallel=single_rank(), model=model, services=take(Services), **held, **values)
    run.listening = services_of(run)
    return run
