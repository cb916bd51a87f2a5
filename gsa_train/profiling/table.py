"""Summarize a profiler's trace: time by trace span, and the slowest operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gsa_train.profiling.step_breakdown import breakdown
from gsa_train.profiling.trace_events import (
    OTHER,
    STEP,
    device_intervals,
    forward_parts_of,
    host_events,
    host_part,
    traced_span,
)
from gsa_train.profiling.trace_spans import PARTS

TOP_OPERATIONS = 15
COMMUNICATION, EXPOSED, IDLE = "communication", "exposed communication", "idle"

Operations = dict[tuple[str, str], tuple[float, int]]
"""(name, part) -> microseconds, calls."""


def profile_table(events: Iterable[Any], steps: Sequence[int], on_gpu: bool) -> str:
    """Returns a table of milliseconds per step. Backward passes count to the trace span of their forward pass.

    Args:
        events: torch.autograd.profiler_util.FunctionEvent of all threads.
        on_gpu: count each instant of the device's time once (gsa_train.profiling.step_breakdown). Otherwise sum each
            operation's own CPU time.
    """
    events = list(events)
    return _device_table(events, steps) if on_gpu else _host_table(events, steps)


def _device_table(events: Sequence[Any], steps: Sequence[int]) -> str:
    intervals = device_intervals(events)
    found = breakdown(intervals, *traced_span(host_events(events), intervals))
    per_step = 1000 * len(steps)
    by_part = {**dict.fromkeys(PARTS, 0.0), OTHER: 0.0, **found.parts}
    by_part[OTHER] += by_part.pop(COMMUNICATION)  # copies and sums around the collectives
    by_part |= {EXPOSED: found.exposed_communication, IDLE: found.idle}
    operations: Operations = {}
    for each in intervals:
        part = COMMUNICATION if each.is_communication else each.part
        _count(operations, each.name, part, each.end - each.start)
    return "\n".join(
        [
            f"steps {steps[0]} to {steps[-1]}: {found.wall / per_step:.1f} ms per step",
            "(slower than without a profiler; forward and backward together; each instant counts once, for the kernel",
            f"that began first. {EXPOSED}: NCCL's kernels while no other runs, waiting for other ranks included.",
            f"{found.overlapped_communication / per_step:.2f} ms/step of communication run beside other kernels.)",
            "",
            *_part_lines(by_part, found.wall, per_step),
            "",
            *_operation_lines(operations, found.wall, len(steps)),
            *_operation_lines(found.waits, found.wall, len(steps), "idle until"),
        ]
    )


def _host_table(events: Sequence[Any], steps: Sequence[int]) -> str:
    on_host = host_events(events)
    ranges = {event.name for event in events if event.is_user_annotation}
    forward_parts = forward_parts_of(on_host)
    by_part: dict[str, float] = defaultdict(float, dict.fromkeys(PARTS, 0.0))
    operations: Operations = {}
    for event in on_host:
        part = host_part(event, forward_parts) or OTHER
        by_part[part] += event.self_cpu_time_total
        if event.name not in ranges:
            _count(operations, event.name, part, event.self_cpu_time_total)
    whole = sum(by_part.values()) or 1.0
    per_step = 1000 * len(steps)
    wall = sum(event.time_range.elapsed_us() for event in on_host if event.name.startswith(STEP))
    return "\n".join(
        [
            f"steps {steps[0]} to {steps[-1]}: {wall / per_step:.1f} ms per step, of it CPU time of operations: "
            f"{whole / per_step:.1f} ms",
            "(slower than without a profiler; forward and backward together)",
            "",
            *_part_lines(by_part, whole, per_step),
            "",
            *_operation_lines(operations, whole, len(steps)),
        ]
    )


def _count(operations: Operations, name: str, part: str, microseconds: float) -> None:
    total, calls = operations.get((name, part), (0.0, 0))
    operations[name, part] = total + microseconds, calls + 1


def _part_lines(by_part: dict[str, float], whole: float, per_step: float) -> list[str]:
    lines = [f"{'part':<24}{'ms/step':>10}{'share':>8}"]
    for part, microseconds in sorted(by_part.items(), key=lambda item: -item[1]):
        lines.append(f"{part:<24}{microseconds / per_step:>10.2f}{microseconds / whole:>8.1%}")
    return lines


def _operation_lines(operations: Operations, whole: float, steps: int, title: str = "operation") -> list[str]:
    lines = [f"{title:<56}{'part':<16}{'calls/step':>11}{'ms/step':>10}{'share':>8}"]
    top = sorted(operations.items(), key=lambda item: -item[1][0])[:TOP_OPERATIONS]
    for (name, part), (microseconds, calls) in top:
        shown = name if len(name) <= 54 else name[:51] + "..."
        lines.append(
            f"{shown:<56}{part:<16}{calls / steps:>11.1f}"
            f"{microseconds / (1000 * steps):>10.2f}{microseconds / whole:>8.1%}"
        )
    return [*lines, ""]
