"""Where the time of a trace goes, on events as torch's profiler gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gsa_train.profile_table import BACKWARD, profile_table


def event(name: str, parent: Any = None, own: float = 0.0, sequence: int = -1, **fields: Any) -> Any:
    """An event of the CPU; times in microseconds."""
    made = {
        "device_type": SimpleNamespace(name="CPU"),
        "is_async": False,
        "is_user_annotation": False,
        "kernels": [],
        "time_range": SimpleNamespace(elapsed_us=lambda: 4000.0),
    }
    names = {"name": name, "cpu_parent": parent, "self_cpu_time_total": own, "sequence_nr": sequence}
    return SimpleNamespace(**{**made, **names, **fields})


def kernel(name: str, microseconds: float) -> Any:
    return SimpleNamespace(name=name, duration=microseconds)


def rows(table: str) -> dict[str, float]:
    """Milliseconds per step by part."""
    lines = table.split("\n\n")[1].splitlines()[1:]
    return {line.split()[0]: float(line.split()[1]) for line in lines if float(line.split()[1])}


def trace() -> list[Any]:
    """Two steps together: attention with an indexer in it, and a backward pass, on the thread that ran all."""
    step = event("ProfilerStep*", is_user_annotation=True)
    attention = event("attention", step, own=1000, is_user_annotation=True)
    indexer = event("indexer", attention, own=200, is_user_annotation=True)
    forward = event("aten::mm", attention, own=3000, sequence=7, kernels=[kernel("gemm", 5000)])
    scores = event("aten::bmm", indexer, own=600, sequence=8, kernels=[kernel("gemm", 700)])
    back = event(f"{BACKWARD}MmBackward0", step, own=100, sequence=7)
    back_mm = event("aten::mm", back, own=4000, kernels=[kernel("gemm", 9000)])
    unknown = event(f"{BACKWARD}CopyBackward", step, own=50, sequence=99)
    # Recomputed in the backward pass: its own range is nearer than the backward node around it.
    again = event("attention", event(f"{BACKWARD}Checkpoint", step, sequence=98), is_user_annotation=True)
    recomputed = event("aten::mm", again, own=500, sequence=11, kernels=[kernel("gemm", 300)])
    reduce = event("c10d::allreduce_", step, own=900, kernels=[kernel("ncclDevKernel_AllReduce", 6000)])
    on_device = event("attention", is_user_annotation=True, device_type=SimpleNamespace(name="CUDA"))
    attention.kernels = [kernel("attention", 77777)]  # the range as the device draws it
    return [
        step,
        attention,
        indexer,
        forward,
        scores,
        back,
        back_mm,
        unknown,
        again,
        recomputed,
        reduce,
        on_device,
    ]


def test_time_on_the_cpu() -> None:
    table = profile_table(trace(), [20, 21], on_gpu=False)
    # Per step, so half of: 1000 + 3000 + 100 + 4000 + 500; 200 + 600; 900; 50.
    assert rows(table) == {"attention": 4.3, "indexer": 0.4, "communication": 0.45, "other": 0.03}
    assert table.startswith("steps 20 to 21: 2.0 ms per step")
    largest = table.split("\n\n")[2].splitlines()[1]
    assert largest.split() == ["aten::mm", "attention", "1.5", "3.75", "72.5%"]


def test_time_on_the_device_is_that_of_kernels() -> None:
    table = profile_table(trace(), [20, 21], on_gpu=True)
    assert rows(table) == {"attention": 7.15, "communication": 3.0, "indexer": 0.35}
    assert "ncclDevKernel_AllReduce" in table
    assert "77" not in table
