"""Phases of a run: which steps they cover, what is trained in them, and how the attention works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsa_train.config import PhaseConfig
from gsa_train.model.build import Model


@dataclass(frozen=True)
class PhaseSpan:
    """A phase and the optimizer steps `start` (inclusive) to `end` (exclusive) that belong to it."""

    index: int
    phase: PhaseConfig
    start: int
    end: int


def phase_spans(phases: Sequence[PhaseConfig]) -> list[PhaseSpan]:
    """Lay the phases end to end."""
    spans, start = [], 0
    for index, phase in enumerate(phases):
        spans.append(PhaseSpan(index, phase, start, start + phase.steps))
        start += phase.steps
    return spans


def enter_phase(model: Model, phase: PhaseConfig) -> None:
    """Freeze what the phase does not train, and set the attention's mode.

    train=indexer: the base runs without a graph, so the indexer is all that can be trained.
    """
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        is_indexer = getattr(parameter, "gsa_indexer", False)
        trained = {"all": True, "base": not is_indexer, "indexer": is_indexer}[phase.train]
        parameter.requires_grad_(trained)
        parameter.grad = None
    runtime = model.runtime
    runtime.sparse = phase.attention == "sparse"
    runtime.train_indexer = model.num_indexers > 0 and phase.train in ("all", "indexer")
    runtime.shared_selection = None
