"""Assign a torch profiler's events, on the host and on the device, to trace spans.

A kernel belongs to the span in which it was launched. If it was launched in the backward pass, it belongs to the span
of the forward operation whose gradient it computes. A kernel and its launch have the same correlation id
(`FunctionEvent.id`). All kernels of a CUDA graph have the id of the graph's launch, so they belong to the span that
replays the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gsa_train.profiling.step_breakdown import Interval
from gsa_train.profiling.trace_spans import PARTS

BACKWARD = "autograd::engine::evaluate_function: "
COLLECTIVES = ("c10d::", "nccl:", "gloo:", "record_param_comms")
STEP = "ProfilerStep"
OTHER = "other"
LAUNCH = re.compile(r"(cuda|cu|hip)[A-Z]")
"""Calls of CUDA's runtime and driver. Operations have separate ids, which may equal launches'."""
WAITS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")
"""Device events of the profiler that are not work (libkineto's names)."""

ForwardParts = dict[tuple[int | None, int], str]
"""(thread, autograd's sequence number) -> span in which the forward operation ran. Each thread has its own numbers."""


def host_events(events: Iterable[Any]) -> list[Any]:
    """Returns operations, ranges and launches. Asynchronous events are left out, because they have no children."""
    return [event for event in events if event.device_type.name == "CPU" and not event.is_async]


def host_part(event: Any, forward_parts: ForwardParts) -> str | None:
    """Returns the innermost span around an event. A backward operation has the span of its forward operation."""
    while event is not None:
        if (part := _named(event, forward_parts)) is not None:
            return part
        event = event.cpu_parent
    return None


def forward_parts_of(on_host: Iterable[Any]) -> ForwardParts:
    found: ForwardParts = {}
    for event in on_host:
        is_forward = event.sequence_nr >= 0 and not event.name.startswith(BACKWARD)
        if is_forward and (part := _forward_part(event)) is not None:
            found[event.thread, event.sequence_nr] = part
    return found


def device_intervals(events: Sequence[Any]) -> list[Interval]:
    """Returns the device's work with the span that launched it, or `other` if unknown."""
    on_host = host_events(events)
    # The profiler also draws the host's ranges on the device, as if they were kernels.
    ranges = {event.name for event in events if event.is_user_annotation}
    work = [
        event
        for event in events
        if event.device_type.name != "CPU" and event.name not in ranges and event.name not in WAITS
    ]
    launches = {event.id: event for event in on_host if LAUNCH.match(event.name)}
    parts = _launch_parts([launches[n] for n in {event.id for event in work} if n in launches], on_host)
    return [
        Interval(
            event.name,
            parts.get(event.id) or OTHER,
            event.time_range.start,
            event.time_range.end,
            event.device_resource_id,
        )
        for event in work
    ]


def traced_span(on_host: Iterable[Any], intervals: Iterable[Interval]) -> tuple[float, float]:
    """Returns the time from the first step's begin on the host to the last step's end, on host or device. The time
    includes work between traced steps, such as a validation."""
    steps = [event.time_range for event in on_host if event.name.startswith(STEP)]
    return min(each.start for each in steps), max(each.end for each in (*steps, *intervals))


def _launch_parts(launches: Sequence[Any], on_host: Sequence[Any]) -> dict[int, str]:
    """Returns the span of each launch, by the launch's id. A launch without a span around it on its own thread belongs
    to the span of any thread that began last and has not ended."""
    forward_parts = forward_parts_of(on_host)
    parts = {launch.id: host_part(launch, forward_parts) for launch in launches}
    found = {number: part for number, part in parts.items() if part is not None}
    marks = [(event, part) for event in on_host if (part := _named(event, forward_parts)) is not None]
    marks.sort(key=lambda mark: mark[0].time_range.start)
    around: list[tuple[Any, str]] = []
    begun = 0
    lost = (launch for launch in launches if launch.id not in found)
    for launch in sorted(lost, key=lambda each: each.time_range.start):
        time = launch.time_range.start
        while begun < len(marks) and marks[begun][0].time_range.start <= time:
            around.append(marks[begun])
            begun += 1
        around = [mark for mark in around if mark[0].time_range.end >= time]
        if around:
            found[launch.id] = around[-1][1]
    return found


def _named(event: Any, forward_parts: ForwardParts) -> str | None:
    if event.name in PARTS:
        return str(event.name)
    if event.name.startswith(COLLECTIVES):
        return "communication"
    if event.name.startswith(BACKWARD):
        return forward_parts.get((event.fwd_thread, event.sequence_nr))
    return None


def _forward_part(event: Any) -> str | None:
    """Return the innermost span around an event, or None if a backward operation lies between event and span.
    Recomputed operations have their own spans inside the backward operation."""
    while event is not None:
        if event.name in PARTS:
            return str(event.name)
        if event.name.startswith(BACKWARD):
            return None
        event = event.cpu_parent
    return None
