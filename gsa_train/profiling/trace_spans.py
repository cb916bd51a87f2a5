"""Define names of trace spans (gsa_train.profiling.profiler). Without a profiler the spans cost nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOTHING = nullcontext()


def trace_span(name: str) -> AbstractContextManager[object]:
    """Mark a span of the step. Names: data, embedding, attention, indexer, selection, kl, mlp, router, exchange,
    experts, loss, communication, optimizer, logging, and ranges around several of them. `mlp` is everything except
    the routed experts."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
