"""What the events of a torch profiler belong to: the part of the step, on the host and on the device.

A kernel belongs to the part that its launch is in; in the backward pass, to the part whose forward pass it belongs to.
Kernel and launch have one correlation id (`FunctionEvent.id`). All kernels of a CUDA graph have the id of the graph's
launch, and so count to the part that replays it, whatever parts they were captured in.
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
"""Calls of CUDA's runtime and driver. Operations' ids are numbers of their own, which may be the same as launches'."""
WAITS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")
"""What the profiler may draw on the device and is no work (libkineto's names)."""

ForwardParts = dict[tuple[int | None, int], str]
"""(thread, autograd's sequence number) -> part in which the forward operation ran. Each thread counts its own."""


def host_events(events: Iterable[Any]) -> list[Any]:
    """Operations, ranges and launches; of those that change threads, which have no children, none."""
    return [event for event in events if event.device_type.name == "CPU" and not event.is_async]


def host_part(event: Any, forward_parts: ForwardParts) -> str | None:
    """Returns the innermost span around an event; for a backward operation, the span of its forward operation."""
    while event is not None:
        if (part := _named(event, forward_parts)) is not None:
            return part
        event = event.cpu_parent
    return None


def forward_parts_of(on_host: Iterable[Any]) -> ForwardParts:
    """Where each forward operation ran."""
    found: ForwardParts = {}
    for event in on_host:
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD):
            part = _forward_part(event)
            if part is not None:
                found[event.thread, event.sequence_nr] = part
    return found


def device_intervals(events: Sequence[Any]) -> list[Interval]:
    """What ran on the device, with the part that launched it, `other` where that is not known."""
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
    """From the first step's beginning on the host to the end of the last, on the host or on the device.

    What lies between traced steps, a validation for example, is part of it.
    """
    steps = [event.time_range for event in on_host if event.name.startswith(STEP)]
    return min(each.start for each in steps), max(each.end for each in (*steps, *intervals))


def _launch_parts(launches: Sequence[Any], on_host: Sequence[Any]) -> dict[int, str]:
    """Launch's id -> part. A launch that no operation stands around counts as the main thread's, whatever thread it was
    on: where that is in no part, it belongs to the part, on any thread, that began last around it."""
    forward_parts = forward_parts_of(on_host)
    found: dict[int, str] = {}
    lost = []
    for launch in launches:
        part = host_part(launch, forward_parts)
        if part is not None:
            found[launch.id] = part
        else:
            lost.append(launch)
    marks = [(event, part) for event in on_host if (part := _named(event, forward_parts)) is not None]
    marks.sort(key=lambda mark: mark[0].time_range.start)
    around: list[tuple[Any, str]] = []
    begun = 0
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
    """The part that an event itself stands for."""
    if event.name in PARTS:
        return str(event.name)
    if event.name.startswith(COLLECTIVES):
        return "communication"
    if event.name.startswith(BACKWARD):
        return forward_parts.get((event.fwd_thread, event.sequence_nr))
    return None


def _forward_part(event: Any) -> str | None:
    """As `host_part` without knowing of forward operations: none inside a backward pass, unless recomputed there."""
    while event is not None:
        if event.name in PARTS:
            return str(event.name)
        if event.name.startswith(BACKWARD):
            return None
        event = event.cpu_parent
    return None
