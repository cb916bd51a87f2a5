"""`phases.*`: the phases of training, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PhaseConfig:
    name: str = "sparse"
    """Name of the phase in logs, metrics and checkpoints. It must be unique."""
    steps: int = 1000
    """Optimizer steps of this phase."""
    attention: Literal["dense", "sparse"] = "sparse"
    """Attend to all causal keys, or to the selected keys."""
    train: Literal["all", "base", "indexer"] = "all"
    """What learns. `indexer`: the indexer alone (warm-up). `base`: everything except the indexer. `all`: both."""
    lr: float = 3e-4
    """Peak learning rate of the base, or of the indexer if `train` is `indexer`."""
    min_lr: float = 3e-5
    """Learning rate at the end of the phase."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0. Each phase starts with a fresh optimizer state."""
    decay: str = "cosine"
    """Schedule of the learning rate after its warm-up: `cosine`, down to `min_lr`, or `constant`."""
    indexer_lr_mult: float = 10.0
    """Learning rate of the indexer divided by the base's, if both learn (table 3 of the paper)."""
    gate_lr_mult: float = 1.0
    """Learning rate of the gates divided by the base's (table 3 of the paper)."""
    kl_coeff: float = 1.0
    """Weight lambda of the indexer loss (eq. 15)."""
