"""Shows when kernels of one layer, and at both ends of a step, start and end (`bench_generate.py --timeline`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
"""Number of recorded steps; the middle one is shown."""
ENDS = 6
"""Kernels shown at each end of a step."""


def show_layer(name: str, step: Callable[[], object], place: Callable[[int], object]) -> None:
    """Show kernels in the middle of a step, from one joined product to the third one after it, and at both ends.

    The end of the step extends to the first kernel of the next step. Steps without our joined products show nothing.

    Args:
        place: sets the counters that a step advances to this number of tokens after the position of measured steps
    """
    # The middle step is at the measured position, the only one at which a selecting step does all of its work.
    place(-(STEPS // 2))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [each for each in recorded.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda each: each.time_range.start)
    entries = [place for place, each in enumerate(kernels) if "_joined_kernel" in each.name]
    if len(entries) < 2:
        return
    middle = len(entries) // 2
    first, last = (
        entries[middle],
        entries[min(middle + 3, len(entries) - 1)],
    )  # a layer has one to three products
    print(f"{name}, a layer or more, us: start, end, kernel")
    show(kernels[first : last + 1], kernels[first].time_range.start)
    count, rest = divmod(len(kernels), STEPS)
    if rest:
        print(f"{name}: {len(kernels)} kernels are not {STEPS} like steps, whose ends are not shown")
        return
    one = kernels[count : 2 * count]
    origin = one[0].time_range.start
    print(f"{name}, both ends of a step of {count} kernels, and the next one's first kernel")
    show(one[:ENDS], origin)
    print("      ...")
    show([*one[-ENDS:], kernels[2 * count]], origin)


def show(kernels: Sequence[Any], origin: float) -> None:
    for each in kernels:
        start, end = each.time_range.start - origin, each.time_range.end - origin
        print(f"{start:9.2f} {end:9.2f}  {each.name[:60]}")
