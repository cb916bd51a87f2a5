"""Phases of a run: which steps they cover, what they train, and how their attention works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsa_train.config import PhaseConfig
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.mcore.build import Model


@dataclass(frozen=True)
class PhaseRange:
    """A phase and the optimizer steps `start` (inclusive) to `end` (exclusive) that belong to it."""

    index: int
    phase: PhaseConfig
    start: int
    end: int


def phase_ranges(phases: Sequence[PhaseConfig]) -> list[PhaseRange]:
    """Lay the phases end to end."""
    ranges, start = [], 0
    for index, phase in enumerate(phases):
        ranges.append(PhaseRange(index, phase, start, start + phase.steps))
        start += phase.steps
    return ranges


def enter_phase(model: Model, phase: PhaseConfig) -> None:
    """Freeze what the phase does not train, and set the kind of pass that its steps make.

    train=indexer: the base runs without autograd, so only the indexer can be trained.
    """
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        is_indexer = getattr(parameter, "gsa_indexer", False)
        trained = {"all": True, "base": not is_indexer, "indexer": is_indexer}[phase.train]
        parameter.requires_grad_(trained)
        parameter.grad = None
    model.runtime.attention_pass = AttentionPass(
        sparse=phase.attention == "sparse",
        trains_indexer=model.num_indexers > 0 and phase.train in ("all", "indexer"),
    )
