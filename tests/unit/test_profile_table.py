"""Tests the times of a trace: torch's events made by hand as on a GPU, and by its profiler on a CPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from gsa_train.profiling.step_breakdown import Interval
from gsa_train.profiling.table import profile_table
from gsa_train.profiling.trace_events import BACKWARD, STEP, device_intervals
from gsa_train.profiling.trace_spans import trace_span

MAIN, AUTOGRAD = 1, 2
"""Thread numbers of the profiler. Launches outside of operations get the main thread's."""


def on_host(
    name: str,
    start: float,
    end: float,
    number: int = 0,
    thread: int = MAIN,
    sequence: int = -1,
    forward_thread: int = 0,
    is_range: bool = False,
) -> FunctionEvent:
    return FunctionEvent(
        number,
        name,
        thread,
        start,
        end,
        fwd_thread=forward_thread,
        sequence_nr=sequence,
        is_user_annotation=is_range,
        use_device="cuda",
    )


def named(name: str, start: float, end: float, thread: int = MAIN) -> FunctionEvent:
    return on_host(name, start, end, thread=thread, is_range=True)


def kernel(
    name: str, start: float, end: float, number: int, stream: int = 7, is_range: bool = False
) -> FunctionEvent:
    return FunctionEvent(
        number,
        name,
        0,
        start,
        end,
        device_type=DeviceType.CUDA,
        device_resource_id=stream,
        is_user_annotation=is_range,
        use_device="cuda",
    )


def tree(events: list[FunctionEvent]) -> EventList:
    for event in events:
        event.cpu_parent, event.cpu_children = None, []
    made = EventList(events, use_device="cuda")
    made._build_tree()
    return made


NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"


def gpu_trace() -> EventList:
    """Return two steps, of 2 ms together: attention with an indexer, its backward pass, an optimizer."""
    return tree(
        [
            named(f"{STEP}*", 1000, 1500),
            named(f"{STEP}*", 1500, 2000),
            named("attention", 1010, 1100),
            named("indexer", 1040, 1060),
            # Operations and launches have separate numbers, here equal and crossed.
            on_host("aten::mm", 1015, 1030, number=11, sequence=7),
            on_host("cudaLaunchKernel", 1020, 1025, number=21),
            on_host("aten::bmm", 1045, 1055, number=21, sequence=8),
            on_host("cuLaunchKernelEx", 1050, 1054, number=11),
            kernel("gemm", 1030, 1230, 21),
            kernel("scores", 1230, 1330, 11),
            # Backward of the main thread's sequence 7; then backward of autograd's own thread, which recomputes an MLP.
            on_host(f"{BACKWARD}MmBackward0", 1200, 1220, 3, AUTOGRAD, sequence=7, forward_thread=MAIN),
            on_host("aten::mm", 1205, 1215, 4, AUTOGRAD),
            on_host("cudaLaunchKernel", 1206, 1207, 31, AUTOGRAD),
            kernel("gemm_backward", 1330, 1500, 31),
            named("mlp", 1230, 1240, AUTOGRAD),
            on_host("aten::mm", 1231, 1239, 5, AUTOGRAD, sequence=7),
            on_host("cudaLaunchKernel", 1232, 1233, 32, AUTOGRAD),
            kernel("gemm_again", 1500, 1550, 32),
            on_host(f"{BACKWARD}MmBackward0", 1250, 1270, 6, AUTOGRAD, sequence=7, forward_thread=AUTOGRAD),
            # The launch is also in that thread, but in no operation, so the profiler assigns it to the main thread.
            on_host("cuLaunchKernelEx", 1260, 1262, 33, MAIN),
            kernel("triton_mlp_backward", 1550, 1650, 33),
            # A collective runs on its own stream, alone at the end.
            on_host("c10d::_reduce_scatter_base_", 1300, 1320, 7),
            on_host("cudaLaunchKernelExC", 1310, 1311, 34),
            kernel(NCCL, 1600, 2100, 34, stream=20),
            # A graph has one launch and two kernels.
            named("optimizer", 1800, 1900),
            on_host("cudaGraphLaunch", 1850, 1860, 35),
            kernel("adam", 2200, 2300, 35),
            kernel("norm", 2300, 2400, 35),
            # Launched before the trace; the host's ranges as drawn on the device; and no work.
            kernel("left_over", 900, 1010, 99),
            kernel("attention", 1030, 2900, 0, is_range=True),
            kernel("nccl:_reduce_scatter_base", 1600, 2950, 0, stream=20, is_range=True),
            named("nccl:_reduce_scatter_base", 1300, 1301),
            kernel("Context Sync", 2400, 2990, 36),
            # The last work ends after the host's last step.
            on_host("aten::add", 1950, 1960, 8),
            on_host("cudaLaunchKernel", 1951, 1952, 37),
            kernel("add", 2900, 3000, 37),
        ]
    )


EXPECTED = {
    "attention": 0.2 + 0.17,
    "indexer": 0.1,
    "mlp": 0.05 + 0.1,
    "optimizer": 0.2,
    "other": 0.01 + 0.1,
    "exposed communication": 0.45,
    "idle": 0.02 + 0.1 + 0.5,
}
"""Milliseconds of both steps, 2.0 together."""


def rows(table: str) -> dict[str, float]:
    """Return milliseconds per step by part, without zeros."""
    lines = table.split("\n\n")[1].splitlines()[1:]
    found = {line[:24].strip(): float(line[24:34]) for line in lines}
    return {part: milliseconds for part, milliseconds in found.items() if milliseconds}


def test_time_on_the_device() -> None:
    table = profile_table(gpu_trace(), [20, 21], on_gpu=True)
    assert rows(table) == pytest.approx({part: value / 2 for part, value in EXPECTED.items()}, abs=0.006)
    assert sum(rows(table).values()) == pytest.approx(1.0, abs=0.03)
    assert table.startswith("steps 20 to 21: 1.0 ms per step\n")
    assert "0.03 ms/step of communication run beside other kernels" in table
    longest = table.split("\n\n")[2].splitlines()[1]
    assert longest.split() == [NCCL, "communication", "0.5", "0.25", "25.0%"]
    waits = [line.split() for line in table.split("\n\n")[3].splitlines()]
    assert waits[0][:2] == ["idle", "until"]
    assert waits[1] == ["add", "other", "0.5", "0.25", "25.0%"]
    assert sum(float(line[-2]) for line in waits[1:]) == pytest.approx(EXPECTED["idle"] / 2, abs=0.006)


class Double(torch.autograd.Function):
    """Runs no operation that autograd knows, like our kernels."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.double().float() * 2

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Recomputed(torch.autograd.Function):
    """Recomputes as megatron-core does: a backward pass within the backward pass."""

    @staticmethod
    def forward(context: Any, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        context.layer = layer
        context.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = context.layer(x)
        again.backward(gradient)
        return None, x.grad


def cpu_trace(steps: int) -> EventList:
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

    def mlp(x: torch.Tensor) -> torch.Tensor:
        with trace_span("mlp"):
            return Double.apply(x @ weights[1]).relu()

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for step in range(steps):
            with record_function(f"{STEP}#{step}"):
                with trace_span("attention"):
                    x = torch.ones(64, 64) @ weights[0]
                    with trace_span("indexer"):
                        x = x + (x @ weights[2]).cumsum(0)
                x = Recomputed.apply(mlp, x)
                with trace_span("loss"):
                    loss = x.exp().sum()
                loss.backward()
                with trace_span("optimizer"), torch.no_grad():
                    for weight in weights:
                        weight.sub_(weight.grad).sin_()
    events = trace.events()
    assert isinstance(events, EventList)
    return events


def test_kernels_follow_the_operations_of_a_real_trace() -> None:
    """Each operation of a real step and its backward pass is treated as launching a kernel."""
    expected = {
        # Forward and twice backward, except the first input without a gradient; recomputed products run forward twice.
        ("aten::mm", "attention"): 2,
        ("aten::mm", "indexer"): 3,
        ("aten::mm", "mlp"): 4,
        ("aten::cumsum", "indexer"): 2,
        ("Double", "mlp"): 2,
        ("DoubleBackward", "mlp"): 1,
        ("aten::relu", "mlp"): 2,
        ("aten::threshold_backward", "mlp"): 1,
        ("aten::exp", "loss"): 1,
        ("aten::sin_", "optimizer"): 3,
    }
    names = {name for name, _ in expected}
    events = list(cpu_trace(steps=1))
    made: list[FunctionEvent] = []
    for number, event in enumerate(event for event in events if event.name in names):
        middle = (event.time_range.start + event.time_range.end) / 2
        made.append(on_host("cudaLaunchKernel", middle, middle, number, thread=event.thread))
        made.append(kernel(event.name, 1e7 + number, 1e7 + number + 1, number))
    found = Counter((each.name, each.part) for each in device_intervals(tree([*events, *made])))
    assert found == expected


def test_what_no_host_event_tells_is_other() -> None:
    events = tree([named(f"{STEP}*", 0, 10), kernel("gemm", 2, 5, 1)])
    assert device_intervals(events) == [Interval("gemm", "other", 2, 5, 7)]
