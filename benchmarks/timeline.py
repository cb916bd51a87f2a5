"""When the kernels of one layer of a decoding step start and end, for `bench_generate.py --timeline`."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def show_layer(name: str, step: Callable[[], object]) -> None:
    """Kernels from one launch of a joined product to the third behind it, in the middle of a step. Nothing, of a step
    without joined products of ours."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = [each for each in recorded.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda each: each.time_range.start)
    entries = [place for place, each in enumerate(kernels) if "_joined_kernel" in each.name]
    if len(entries) < 2:
        return
    middle = len(entries) // 2
    first, last = entries[middle], entries[min(middle + 3, len(entries) - 1)]  # a layer has one to three
    origin = kernels[first].time_range.start
    print(f"{name}, a layer or more, us: start, end, kernel")
    for each in kernels[first : last + 1]:
        start, end = each.time_range.start - origin, each.time_range.end - origin
        print(f"{start:9.2f} {end:9.2f}  {each.name[:60]}")
