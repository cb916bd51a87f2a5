"""Define the phases of a run: their steps, trained parameters, learning rates and form of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gsa_train.config import PhaseConfig, TrainConfig
from gsa_train.config.batch_ramp import batch_size, sequences_before
from gsa_train.config.load import chosen
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.mcore.build import Model
from gsa_train.schedule import SCHEDULES


@dataclass(frozen=True)
class PhaseRange:
    """A phase and the optimizer steps `start` (inclusive) to `end` (exclusive) that belong to it."""

    index: int
    phase: PhaseConfig
    start: int
    end: int


def phase_ranges(phases: Sequence[PhaseConfig]) -> list[PhaseRange]:
    ranges, start = [], 0
    for index, phase in enumerate(phases):
        ranges.append(PhaseRange(index, phase, start, start + phase.steps))
        start += phase.steps
    return ranges


def learning_rate(phase: PhaseConfig, phase_step: float) -> float:
    """Return the learning rate at step `phase_step` of the phase, counted from 0. Parameter groups may multiply this
    rate.

    The rate rises linearly from 0 to `lr` over `warmup_steps`. Then it follows the phase's schedule up to the last
    step. If a phase has only one step, its rate is `lr`.
    """
    if phase_step + 1 <= phase.warmup_steps:
        return phase.lr * (phase_step + 1) / phase.warmup_steps
    return chosen(SCHEDULES, "phases.decay", phase.decay)(phase_step, phase)


def in_batches(train: TrainConfig, phase_range: PhaseRange, step: int) -> tuple[PhaseConfig, float]:
    """Return the arguments of `learning_rate`: the phase, and the number of the step in the phase.

    Without a batch ramp (`train.batch_ramp`), the phase is unchanged, and steps count from the phase's start. With a
    ramp, the learning rate depends on the token count. A step with half the sequences of the phase's last step
    therefore counts as 0.5. The returned `steps`, `warmup_steps` and `decay_steps` are counted this way.

    Args:
        step: number of earlier steps of the run.
    """
    phase, start = phase_range.phase, phase_range.start
    if not train.batch_ramp:
        return phase, step - start

    last_batch = batch_size(train, phase_range.end - 1)

    def batches(phase_steps: int) -> float:
        return (sequences_before(train, start + phase_steps) - sequences_before(train, start)) / last_batch

    lengths: dict[str, Any] = {"steps": batches(phase.steps), "warmup_steps": batches(phase.warmup_steps)}
    lengths["decay_steps"] = lengths["steps"] - batches(phase.steps - phase.decay_steps)
    # The rate is a function of the tokens at the end of the step.
    return replace(phase, **lengths), batches(step - start + 1) - 1


def lr_multipliers(phase: PhaseConfig) -> dict[str, float]:
    """Return each trained group's learning rate divided by the phase's learning rate, keyed by metric name."""
    if phase.train == "indexer":
        return {"indexer": 1.0}
    multipliers = {"base": 1.0, "gates": phase.gate_lr_mult}
    if phase.train == "all":
        multipliers["indexer"] = phase.indexer_lr_mult
    return multipliers


def enter_phase(model: Model, phase: PhaseConfig) -> None:
    """Freeze the parameters that the phase does not train. Also set the attention of the forward passes: sparse or
    dense, with or without the indexer loss."""
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        is_indexer = getattr(parameter, "gsa_indexer", False)
        trained = {"all": True, "base": not is_indexer, "indexer": is_indexer}[phase.train]
        parameter.requires_grad_(trained)
        parameter.grad = None
    model.runtime.attention_pass = AttentionPass(
        sparse=phase.attention == "sparse",
        trains_indexer=model.num_indexers > 0 and phase.train in ("all", "indexer"),
    )
