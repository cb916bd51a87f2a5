"""`logging.*`: metrics, TensorBoard, W&B, plots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LoggingConfig:
    every_steps: int = 10
    """Steps between logged steps."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online when an API key is configured, else offline."""
    wandb_project: str = "gsa_train"
    """Weights & Biases project."""
    wandb_entity: str = ""
    """User or team that the project belongs to; empty: W&B's default."""
    wandb_group: str = ""
    """Group of runs that W&B shows together, as the arms of one comparison; empty: none."""
    wandb_tags: list[str] = field(default_factory=list)
    """Words to find the run by in W&B."""
    straggler_ratio: float = 1.5
    """Warn when a rank works so many times as long as the median rank, without what it waits for others."""
    plots: bool = True
    """Write plots/*.png and report.html at the end of the run."""
