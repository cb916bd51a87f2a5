"""Define the config of all sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gsa_train.config.checkpoint import CheckpointConfig
from gsa_train.config.data import DataConfig
from gsa_train.config.evaluate import EvaluateConfig
from gsa_train.config.gsa import GSAConfig
from gsa_train.config.load import problem_line
from gsa_train.config.logging import LoggingConfig
from gsa_train.config.model import ModelConfig
from gsa_train.config.moe import MoEConfig
from gsa_train.config.monitor import MonitorConfig
from gsa_train.config.parallel import ParallelConfig
from gsa_train.config.phases import PhaseConfig
from gsa_train.config.profile import ProfileConfig
from gsa_train.config.run import RunConfig
from gsa_train.config.train import TrainConfig


@dataclass(frozen=True)
class Config:
    """Holds the sections of a config. A section's fields are described in the file of its name."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    gsa: GSAConfig = field(default_factory=GSAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    phases: list[PhaseConfig] = field(default_factory=list)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def value_of(self, name: str) -> Any:
        """Return the value of a field such as `train.precision` or `phases.0.lr`."""
        value: Any = self
        for key in name.split("."):
            value = value[int(key)] if isinstance(value, list) else getattr(value, key)
        return value

    def problem(self, name: str, wrong: str, remedy: str) -> str:
        """Return the line `field = value: what is wrong; remedy` for a field of this config."""
        return problem_line(name, self.value_of(name), wrong, remedy)
