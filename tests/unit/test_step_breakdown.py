"""Tests that each instant of a device's time counts once."""

import pytest

from gsa_train.profiling.step_breakdown import THE_END, Breakdown, Interval, breakdown

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
H2D, D2D = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)"
GEMM, ADAM = ("gemm", "mlp"), ("adam", "optimizer")

CASES: dict[str, tuple[list[Interval], Breakdown]] = {
    "nothing": ([], Breakdown(100, {}, 0, 0, 100, {THE_END: (100, 1)})),
    "one after the other": (
        [Interval("gemm", "mlp", 10, 30, 7), Interval("softmax", "attention", 30, 45, 7)],
        Breakdown(100, {"mlp": 20, "attention": 15}, 0, 0, 65, {GEMM: (10, 1), THE_END: (55, 1)}),
    ),
    "side by side: the union, and what began first has it": (
        [Interval("gemm", "mlp", 10, 50, 7), Interval("softmax", "attention", 40, 80, 9)],
        Breakdown(100, {"mlp": 40, "attention": 30}, 0, 0, 30, {GEMM: (10, 1), THE_END: (20, 1)}),
    ),
    "one within the other": (
        [Interval("gemm", "mlp", 10, 50, 7), Interval("softmax", "attention", 20, 30, 9)],
        Breakdown(100, {"mlp": 40}, 0, 0, 60, {GEMM: (10, 1), THE_END: (50, 1)}),
    ),
    "together: the lower stream has it": (
        [Interval("softmax", "attention", 10, 20, 9), Interval("gemm", "mlp", 10, 20, 7)],
        Breakdown(100, {"mlp": 10}, 0, 0, 90, {GEMM: (10, 1), THE_END: (80, 1)}),
    ),
    "communication that began first, half hidden by two kernels": (
        [
            Interval(NCCL, "communication", 0, 60, 20),
            Interval("gemm", "mlp", 20, 40, 7),
            Interval("adam", "optimizer", 35, 50, 8),
        ],
        Breakdown(100, {"mlp": 20, "optimizer": 10}, 30, 30, 40, {THE_END: (40, 1)}),
    ),
    "two collectives at once are exposed once": (
        [Interval(NCCL, "mlp", 0, 60, 20), Interval("ncclDevKernel_SendRecv", "other", 30, 80, 21)],
        Breakdown(100, {}, 80, 0, 20, {THE_END: (20, 1)}),
    ),
    "copies from the host hide no communication, copies on the device do": (
        [
            Interval(H2D, "data", 0, 30, 12),
            Interval(NCCL, "communication", 20, 70, 20),
            Interval(D2D, "mlp", 60, 70, 7),
            Interval("gemm", "mlp", 0, 10, 7),
        ],
        Breakdown(100, {"data": 10, "mlp": 20}, 40, 10, 30, {THE_END: (30, 1)}),
    ),
    "two waits for one kind of kernel": (
        [
            Interval("gemm", "mlp", 20, 30, 7),
            Interval("adam", "optimizer", 30, 40, 7),
            Interval("gemm", "mlp", 45, 100, 7),
        ],
        Breakdown(100, {"mlp": 65, "optimizer": 10}, 0, 0, 25, {GEMM: (25, 2)}),
    ),
    "what reaches out of the window is cut": (
        [
            Interval("gemm", "mlp", -50, 10, 7),
            Interval("adam", "optimizer", 90, 300, 7),
            Interval("gemm", "mlp", 200, 300, 7),
        ],
        Breakdown(100, {"mlp": 10, "optimizer": 10}, 0, 0, 80, {ADAM: (80, 1)}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_known_by_hand(name: str) -> None:
    intervals, expected = CASES[name]
    assert breakdown(intervals, 0, 100) == expected
    assert breakdown(reversed(intervals), 0, 100) == expected
