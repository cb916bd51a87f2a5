"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from gsa_train.config import PhaseConfig


def learning_rate(phase: PhaseConfig, phase_step: int) -> float:
    """Learning rate of the base at one step of a phase.

    Linear learning-rate warm-up from 0 to `lr` over `warmup_steps`, then a half cosine to `min_lr` at the phase's last
    step (or `lr` throughout with decay=constant). The one step of a phase of one has `lr`.

    Args:
        phase: the phase.
        phase_step: 0 for the first step of the phase.
    """
    if phase_step < phase.warmup_steps:
        return phase.lr * (phase_step + 1) / phase.warmup_steps
    if phase.decay == "constant":
        return phase.lr
    decay_steps = phase.steps - 1 - phase.warmup_steps
    if decay_steps == 0 and phase.warmup_steps > 0:
        return phase.min_lr  # the warm-up has ended with `lr`
    progress = min((phase_step - phase.warmup_steps) / max(decay_steps, 1), 1.0)
    return phase.min_lr + 0.5 * (phase.lr - phase.min_lr) * (1.0 + math.cos(math.pi * progress))


def lr_multipliers(phase: PhaseConfig) -> dict[str, float]:
    """Learning rate of each trained group over the phase's learning rate, under the names of the metrics."""
    if phase.train == "indexer":
        return {"indexer": 1.0}
    multipliers = {"base": 1.0, "gates": phase.gate_lr_mult}
    if phase.train == "all":
        multipliers["indexer"] = phase.indexer_lr_mult
    return multipliers
