"""`logging.*`: metrics, TensorBoard, W&B."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LoggingConfig:
    every_steps: int = 10
    """Steps between logged steps. A logged step also measures attention."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Use of Weights & Biases. `offline`: records stay in the run folder for `wandb sync`. `auto`: as the variable
    WANDB_MODE says. If it is not set, W&B is online if an API key is configured, else offline."""
    wandb_project: str = "gsa_train"
    """Project in Weights & Biases."""
    wandb_entity: str = ""
    """User or team in W&B that the project belongs to. Empty: W&B's default."""
    wandb_group: str = ""
    """Group of runs that W&B shows together, for example the arms of one comparison. Empty: none."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run in W&B."""
    straggler_ratio: float = 1.5
    """Warn when a rank works this many times as long as the median rank. Time spent waiting for other ranks does not
    count."""
