"""Tests the times in the table made from a profiler trace. GPU events are made up. CPU events come from torch's
profiler."""

from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile

from gsa_train.profiling.step_breakdown import THE_END, Breakdown, Interval, breakdown
from gsa_train.profiling.table import profile_table
from gsa_train.profiling.trace_events import BACKWARD, STEP, forward_parts_of, host_events
from helpers.single_rank import SPARSE, random_batches, step_gradients, tiny_config, tiny_model

MAIN, AUTOGRAD = 1, 2
"""Thread numbers of the profiler. Launches outside of operations get the main thread's."""


def on_host(
    name: str, start: float, end: float, number: int = 0, thread: int = MAIN, **more: Any
) -> FunctionEvent:
    return FunctionEvent(number, name, thread, start, end, use_device="cuda", **more)


def named(name: str, start: float, end: float, thread: int = MAIN) -> FunctionEvent:
    return on_host(name, start, end, thread=thread, is_user_annotation=True)


def kernel(
    name: str, start: float, end: float, number: int, stream: int = 7, is_range: bool = False
) -> FunctionEvent:
    place = {"device_type": DeviceType.CUDA, "device_resource_id": stream, "is_user_annotation": is_range}
    return on_host(name, start, end, number, thread=0, **place)


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
            # Operations and launches are numbered separately. Here 11 and 21 are numbers of both, in opposite order.
            on_host("aten::mm", 1015, 1030, number=11, sequence_nr=7),
            on_host("cudaLaunchKernel", 1020, 1025, number=21),
            on_host("aten::bmm", 1045, 1055, number=21, sequence_nr=8),
            on_host("cuLaunchKernelEx", 1050, 1054, number=11),
            kernel("gemm", 1030, 1230, 21),
            kernel("scores", 1230, 1330, 11),
            # Backward of the main thread's sequence 7; then backward of autograd's own thread, which recomputes an MLP.
            on_host(f"{BACKWARD}MmBackward0", 1200, 1220, 3, AUTOGRAD, sequence_nr=7, fwd_thread=MAIN),
            on_host("aten::mm", 1205, 1215, 4, AUTOGRAD),
            on_host("cudaLaunchKernel", 1206, 1207, 31, AUTOGRAD),
            kernel("gemm_backward", 1330, 1500, 31),
            named("mlp", 1230, 1240, AUTOGRAD),
            on_host("aten::mm", 1231, 1239, 5, AUTOGRAD, sequence_nr=7),
            on_host("cudaLaunchKernel", 1232, 1233, 32, AUTOGRAD),
            kernel("gemm_again", 1500, 1550, 32),
            on_host(f"{BACKWARD}MmBackward0", 1250, 1270, 6, AUTOGRAD, sequence_nr=7, fwd_thread=AUTOGRAD),
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
            # A kernel launched before the trace, the host's ranges as drawn on the device, and an event without work.
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
    "attention": 0.2 + 0.17, "indexer": 0.1, "mlp": 0.05 + 0.1, "optimizer": 0.2, "other": 0.01 + 0.1,
    "exposed communication": 0.45, "idle": 0.02 + 0.1 + 0.5,
}  # fmt: skip
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


def test_projections_launched_during_the_selection_count_as_attention() -> None:
    config = tiny_config([SPARSE])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step_gradients(tiny_model(config, variance_ema=0.02), SPARSE, random_batches(config), config)
    on_host = host_events(profiler.events())
    assert "selection" in {event.name for event in on_host}
    # These are parts with differentiable operations. The selection has none of its own.
    parts = set(forward_parts_of(on_host).values())
    assert {"attention", "indexer", "mlp"} <= parts
    assert "selection" not in parts


# --- each instant of a device's time counts once -------------------------------------------------------------

GEMM, ADAM = ("gemm", "mlp"), ("adam", "optimizer")


def gemm(start: float, end: float) -> Interval:
    return Interval("gemm", "mlp", start, end, 7)


def adam(start: float, end: float) -> Interval:
    return Interval("adam", "optimizer", start, end, 8)


def softmax(start: float, end: float) -> Interval:
    return Interval("softmax", "attention", start, end, 9)


def collective(start: float, end: float, stream: int = 20) -> Interval:
    return Interval(NCCL, "communication", start, end, stream)


FROM_HOST = Interval("Memcpy HtoD (Pinned -> Device)", "data", 0, 30, 12)
ON_DEVICE = Interval("Memcpy DtoD (Device -> Device)", "mlp", 60, 70, 7)

CASES: dict[str, tuple[list[Interval], Breakdown]] = {
    "nothing": ([], Breakdown(100, {}, 0, 0, 100, {THE_END: (100, 1)})),
    "one after the other": (
        [gemm(10, 30), softmax(30, 45)],
        Breakdown(100, {"mlp": 20, "attention": 15}, 0, 0, 65, {GEMM: (10, 1), THE_END: (55, 1)}),
    ),
    "side by side: the union, and what began first has it": (
        [gemm(10, 50), softmax(40, 80)],
        Breakdown(100, {"mlp": 40, "attention": 30}, 0, 0, 30, {GEMM: (10, 1), THE_END: (20, 1)}),
    ),
    "one within the other": (
        [gemm(10, 50), softmax(20, 30)],
        Breakdown(100, {"mlp": 40}, 0, 0, 60, {GEMM: (10, 1), THE_END: (50, 1)}),
    ),
    "together: the lower stream has it": (
        [softmax(10, 20), gemm(10, 20)],
        Breakdown(100, {"mlp": 10}, 0, 0, 90, {GEMM: (10, 1), THE_END: (80, 1)}),
    ),
    "communication that began first, half hidden by two kernels": (
        [collective(0, 60), gemm(20, 40), adam(35, 50)],
        Breakdown(100, {"mlp": 20, "optimizer": 10}, 30, 30, 40, {THE_END: (40, 1)}),
    ),
    "two collectives at once are exposed once": (
        [collective(0, 60), collective(30, 80, stream=21)],
        Breakdown(100, {}, 80, 0, 20, {THE_END: (20, 1)}),
    ),
    "copies from the host hide no communication, copies on the device do": (
        [FROM_HOST, collective(20, 70), ON_DEVICE, gemm(0, 10)],
        Breakdown(100, {"data": 10, "mlp": 20}, 40, 10, 30, {THE_END: (30, 1)}),
    ),
    "two waits for one kind of kernel": (
        [gemm(20, 30), adam(30, 40), gemm(45, 100)],
        Breakdown(100, {"mlp": 65, "optimizer": 10}, 0, 0, 25, {GEMM: (25, 2)}),
    ),
    "what reaches out of the window is cut": (
        [gemm(-50, 10), adam(90, 300), gemm(200, 300)],
        Breakdown(100, {"mlp": 10, "optimizer": 10}, 0, 0, 80, {ADAM: (80, 1)}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_known_by_hand(name: str) -> None:
    intervals, expected = CASES[name]
    assert breakdown(intervals, 0, 100) == expected
    assert breakdown(reversed(intervals), 0, 100) == expected
