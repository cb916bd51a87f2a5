"""Fields of a config that choose code by its name, from the tables of rooms above the config."""

from __future__ import annotations

from gsa_train.config import Config
from gsa_train.config.load import not_in
from gsa_train.losses import OBJECTIVES
from gsa_train.model.mcore.linears import LINEAR_LAYERS
from gsa_train.optimizer.build import OPTIMIZERS
from gsa_train.schedule import SCHEDULES


def unknown_choices(config: Config) -> list[str]:
    """A line for each name that its table lacks. The tables load no torch by themselves."""
    phases = enumerate(config.phases)
    return [
        *(line for n, each in phases for line in not_in(SCHEDULES, f"phases.{n}.decay", each.decay)),
        *not_in(LINEAR_LAYERS, "train.linear_layers", config.train.linear_layers),
        *not_in(OBJECTIVES, "train.objective", config.train.objective),
        *not_in(OPTIMIZERS, "train.optimizer", config.train.optimizer),
    ]
