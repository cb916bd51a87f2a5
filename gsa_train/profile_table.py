"""A profiler's trace in short: time by part of the step, and the operations that take the most of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gsa_train.spans import PARTS

TOP_OPERATIONS = 15
BACKWARD = "autograd::engine::evaluate_function: "
COLLECTIVES = ("c10d::", "nccl:", "gloo:", "record_param_comms")
OTHER = "other"


def profile_table(events: Iterable[Any], steps: Sequence[int], on_gpu: bool) -> str:
    """Milliseconds per step, the backward pass counted to the part whose forward pass it belongs to.

    Args:
        events: torch.autograd.profiler_util.FunctionEvent, of all threads.
        steps: those that were traced.
        on_gpu: time of the device's kernels, by where they were launched from; else of the CPU in each operation
            itself. Kernels that run side by side, as communication does, count each.
    """
    events = list(events)
    on_host = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    # The profiler also draws ranges on the device, as if they were kernels.
    ranges = {event.name for event in events if event.is_user_annotation}
    parts = _forward_parts(on_host)
    by_part: dict[str, float] = defaultdict(float)
    by_operation: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in on_host:
        part = _part(event, parts) or OTHER
        for name, microseconds in _times(event, on_gpu, ranges):
            where = "communication" if "nccl" in name.lower() else part
            by_part[where] += microseconds
            if name not in ranges:
                total, count = by_operation[name, where]
                by_operation[name, where] = total + microseconds, count + 1
    whole = sum(by_part.values()) or 1.0
    per_step = 1000 * len(steps)
    wall = sum(event.time_range.elapsed_us() for event in on_host if event.name.startswith("ProfilerStep"))
    clock = "kernels on the device" if on_gpu else "CPU time of operations"
    lines = [
        f"steps {steps[0]} to {steps[-1]}: {wall / per_step:.1f} ms per step, of it {clock}: {whole / per_step:.1f} ms",
        "(slower than without a profiler; forward and backward together)",
        "",
        f"{'part':<16}{'ms/step':>10}{'share':>8}",
    ]
    for part in sorted({*PARTS, *by_part}, key=lambda name: -by_part[name]):
        lines.append(f"{part:<16}{by_part[part] / per_step:>10.2f}{by_part[part] / whole:>8.1%}")
    lines += ["", f"{'operation':<56}{'part':<16}{'calls/step':>11}{'ms/step':>10}{'share':>8}"]
    top = sorted(by_operation.items(), key=lambda item: -item[1][0])[:TOP_OPERATIONS]
    for (name, part), (microseconds, count) in top:
        shown = name if len(name) <= 54 else name[:51] + "..."
        lines.append(
            f"{shown:<56}{part:<16}{count / len(steps):>11.1f}"
            f"{microseconds / per_step:>10.2f}{microseconds / whole:>8.1%}"
        )
    return "\n".join(lines) + "\n"


def _times(event: Any, on_gpu: bool, ranges: set[str]) -> list[tuple[str, float]]:
    """(name, microseconds) that count for this event and not for one inside it."""
    if on_gpu:
        return [(kernel.name, kernel.duration) for kernel in event.kernels if kernel.name not in ranges]
    return [(event.name, event.self_cpu_time_total)]


def _forward_parts(events: Iterable[Any]) -> dict[int, str]:
    """Autograd's sequence number -> part in which the forward operation ran."""
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD):
            part = _named_part(event)
            if part is not None:
                found[event.sequence_nr] = part
    return found


def _part(event: Any, forward_parts: dict[int, str]) -> str | None:
    """The innermost part around an event; of a backward operation, that of its forward operation."""
    while event is not None:
        if event.name in PARTS:
            return str(event.name)
        if event.name.startswith(COLLECTIVES):
            return "communication"
        if event.name.startswith(BACKWARD) and event.sequence_nr in forward_parts:
            return forward_parts[event.sequence_nr]
        event = event.cpu_parent
    return None


def _named_part(event: Any) -> str | None:
    """As `_part` without knowing of forward operations: none inside a backward pass, unless it is recomputed there."""
    while event is not None:
        if event.name in PARTS:
            return str(event.name)
        if event.name.startswith(BACKWARD):
            return None
        event = event.cpu_parent
    return None
