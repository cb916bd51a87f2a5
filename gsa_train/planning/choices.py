"""List the config fields that choose code by its name, from tables in other packages."""

from __future__ import annotations

from collections.abc import Mapping

from gsa_train.config import Config, TrainConfig
from gsa_train.config.load import not_in
from gsa_train.losses import OBJECTIVES
from gsa_train.model.mcore.linears import LINEAR_LAYERS
from gsa_train.optimizer.build import OPTIMIZERS
from gsa_train.schedule import SCHEDULES

TABLES: dict[str, Mapping[str, object]] = {
    "linear_layers": LINEAR_LAYERS,
    "objective": OBJECTIVES,
    "optimizer": OPTIMIZERS,
}
"""Maps fields of `train` to the tables of their names. The tables do not load torch."""


def unknown_choices(config: Config) -> list[str]:
    """Return a line for each name that its table lacks."""
    phases = enumerate(config.phases)
    lines = [not_in(TABLES[field], f"train.{field}", getattr(config.train, field)) for field in TABLES]
    lines += [not_in(SCHEDULES, f"phases.{number}.decay", phase.decay) for number, phase in phases]
    return [line for each in lines for line in each]


def choices_of(train: TrainConfig) -> list[str]:
    """Return the names that are not the defaults, as `field = name`."""
    default = TrainConfig()
    return [
        f"{name} = {value}" for name in TABLES if (value := getattr(train, name)) != getattr(default, name)
    ]
