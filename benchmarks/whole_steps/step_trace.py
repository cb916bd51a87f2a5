"""Profiles some steps of a model: where the time of a step goes on this rank's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from gsa_train.profiling.step_breakdown import Breakdown, breakdown
from gsa_train.profiling.trace_events import OTHER, STEP, device_intervals, host_events, traced_span

COLUMNS = {
    "attention": ("attention",),
    "indexer": ("indexer", "selection"),
    "kl": ("kl",),
    "mlp": ("mlp", "router", "exchange", "experts"),
    "loss": ("loss",),
    "optimizer": ("optimizer",),
    "data": ("data",),
}
"""Maps a name in the report to parts of the step. `other` holds the remaining parts."""
OF_EXPERTS = {**COLUMNS, "mlp": ("mlp",), **{name: (name,) for name in ("router", "exchange", "experts")}}
"""COLUMNS with the parts of a mixture of experts. `mlp` is norm, residual connection and shared expert."""


def trace_steps(step: Callable[[], None], steps: int) -> Breakdown:
    """Trace `steps` steps together, after one more to warm up the profiler. Collective. Needs CUDA devices."""
    trace = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    trace.prepare_trace()
    step()
    dist.barrier()  # so that no rank waits for another's profiler
    torch.cuda.synchronize()
    trace.start_trace()
    for number in range(steps):
        with record_function(f"{STEP}#{number}"):
            step()
    torch.cuda.synchronize()
    trace.stop_trace()
    events = list(trace.events())
    intervals = device_intervals(events)
    return breakdown(intervals, *traced_span(host_events(events), intervals))


def in_columns(
    found: Breakdown, steps: int, names: Mapping[str, Sequence[str]] = COLUMNS
) -> dict[str, float]:
    """Return milliseconds per step by name: all columns except the first and the last add up to the first."""
    parts = dict(found.parts)
    columns = {name: sum(parts.pop(part, 0.0) for part in of) for name, of in names.items()}
    columns[OTHER] = sum(parts.values())
    microseconds = {
        "traced_step": found.wall,
        **columns,
        "exposed_communication": found.exposed_communication,
        "idle": found.idle,
        "overlapped_communication": found.overlapped_communication,
    }
    return {f"{name}_ms": value / (1000 * steps) for name, value in microseconds.items()}
