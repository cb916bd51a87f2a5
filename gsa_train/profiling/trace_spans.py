"""Define names of trace spans (gsa_train.profiling.profiler). Without a profiler the spans cost nothing."""

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
"""Spans in the order of a step. A nested span, such as the indexer inside the attention, counts separately. With
experts `mlp` is everything except the routed experts: norm, residual connection, shared expert."""

_NOTHING = nullcontext()


def trace_span(name: str) -> AbstractContextManager[object]:
    """Mark a span of the step: one of PARTS, or a range around several parts."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
