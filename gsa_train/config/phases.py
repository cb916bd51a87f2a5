"""`phases.*`: the phases of training, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gsa_train.config.load import problem_line


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
    """Steps over which the learning rate rises linearly from 0."""
    decay: str = "cosine"
    """Schedule of the learning rate after its warm-up. `cosine` and `linear` fall to `min_lr` at the last step.
    `inverse_sqrt` falls as 1 / sqrt(step), not below `min_lr`. `wsd` stays at `lr`, then falls to `min_lr` over the
    last `decay_steps` steps. `constant` stays at `lr`."""
    decay_steps: int = 0
    """With `decay` = `wsd`, the number of last steps over which the rate falls."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """With `decay` = `wsd`, the shape of the fall."""
    keep_optimizer: bool = False
    """Start with the optimizer state and step count of the previous phase, which must train the same parameters
    (`train`). False: start with fresh state."""
    indexer_lr_mult: float = 10.0
    """Learning rate of the indexer divided by the base model's rate, if both learn (table 3 of the paper)."""
    gate_lr_mult: float = 1.0
    """Learning rate of the gates divided by the base model's rate (table 3 of the paper)."""
    kl_coeff: float = 1.0
    """Weight lambda of the indexer loss (eq. 15)."""


def check_decay(phase: PhaseConfig, name: str) -> list[str]:
    lines = []
    if phase.decay != "wsd":
        remedy = f"set {name}.decay to wsd, or leave it out"
        for field, unset in (("decay_steps", 0), ("decay_shape", "linear")):
            if (value := getattr(phase, field)) != unset:
                lines.append(
                    problem_line(f"{name}.{field}", value, f"{name}.decay = {phase.decay} has none", remedy)
                )
    elif not 0 < phase.decay_steps <= phase.steps - phase.warmup_steps:
        wrong = (
            f"not between 1 and the {phase.steps - phase.warmup_steps} steps after the learning-rate warm-up"
        )
        remedy = "give the number of last steps over which the rate falls"
        lines.append(problem_line(f"{name}.decay_steps", phase.decay_steps, wrong, remedy))
    return lines


def check_kept_optimizer(phases: list[PhaseConfig]) -> list[str]:
    lines = []
    for index, phase in enumerate(phases):
        if not phase.keep_optimizer:
            continue
        field = f"phases.{index}.keep_optimizer"
        if index == 0:
            remedy = "leave it out; for the state of another run set checkpoint.initial_state=continue"
            lines.append(problem_line(field, True, "no phase precedes it", remedy))
        elif (before := phases[index - 1].train) != phase.train:
            wrong = f"the previous phase trains {before}, this phase {phase.train}"
            lines.append(problem_line(field, True, wrong, "train the same in both, or leave it out"))
    return lines
