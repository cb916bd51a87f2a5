"""`phases.*`: the phases of training, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


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


def check_decay(config: Config, name: str) -> Iterator[str]:
    phase: PhaseConfig = config.value_of(name)
    steps = phase.steps - phase.warmup_steps
    if phase.decay != "wsd":
        wrong, remedy = f"{name}.decay = {phase.decay} has none", f"set {name}.decay to wsd, or leave it out"
        if phase.decay_steps != 0:
            yield config.problem(f"{name}.decay_steps", wrong, remedy)
        if phase.decay_shape != "linear":
            yield config.problem(f"{name}.decay_shape", wrong, remedy)
    elif not 0 < phase.decay_steps <= steps:
        wrong = f"not between 1 and the {steps} steps after the learning-rate warm-up"
        remedy = "give the number of last steps over which the rate falls"
        yield config.problem(f"{name}.decay_steps", wrong, remedy)


def check_kept_optimizer(config: Config) -> Iterator[str]:
    for index, phase in enumerate(config.phases):
        field = f"phases.{index}.keep_optimizer"
        if phase.keep_optimizer and index == 0:
            remedy = "leave it out; for the state of another run set checkpoint.initial_state=continue"
            yield config.problem(field, "no phase precedes it", remedy)
        elif phase.keep_optimizer and (before := config.phases[index - 1].train) != phase.train:
            wrong = f"the previous phase trains {before}, this phase {phase.train}"
            yield config.problem(field, wrong, "train the same in both, or leave it out")
