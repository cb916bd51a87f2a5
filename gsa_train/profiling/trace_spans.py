"""Names of a step's parts in a profiler's trace (gsa_train.profiling.profiler); without one they cost nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

PARTS = (
    "data",
    "embedding",
    "attention",
    "indexer",
    "selection",
    "kl",
    "mlp",
    "router",
    "exchange",
    "experts",
    "loss",
    "communication",
    "optimizer",
    "logging",
)
"""In the order of a step. What is inside another, as the indexer is inside the attention, counts for itself. With
experts `mlp` is what is beside the routed ones: norm, residual connection, shared expert."""

_NOTHING = nullcontext()


def trace_span(name: str) -> AbstractContextManager[object]:
    """A part of the step: one of PARTS, or what holds several of them."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
