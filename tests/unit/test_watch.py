"""Tests which rank is named for a hanging run, also at its end, and which for a slow one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from gsa_train.profiling.work_time import StragglerWarning, WorkTime, slowest
from gsa_train.reliability.hang_watchdog import (
    ACTIVITIES,
    ALL_SAFE,
    REPORT,
    Age,
    Beat,
    find_fault,
    newest_hang,
)

TIMEOUT = 60.0


def beat(step: int = 7, activity: str = "training", number: int = 1, progress: int = 1) -> Beat:
    return Beat(number, progress, step, ACTIVITIES.index(activity), "node", 100, TIMEOUT)


def named(fault: str) -> list[int]:
    return [int(line.split()[1]) for line in fault.splitlines() if line.endswith("<--")]


@pytest.mark.parametrize(
    ("ages", "expected"),
    [
        ([Age(beat(), 0, 59), Age(beat(), 59, 10)], None),  # it goes on
        (
            [Age(beat(), 0, 61), Age(beat(), 58, 60), Age(beat(), 1, 61)],
            [1],
        ),  # no heartbeat; the others wait
        ([Age(beat(), 0, 61), Age(beat(), 0, 61), Age(beat(activity="reading text"), 0, 62)], [2]),
        ([Age(beat(), 0, 61), Age(beat(6, "saving"), 0, 62), Age(beat(), 0, 61)], [1]),
        # The rank that waits longest began to wait before the other rank blocked.
        ([Age(beat(), 0, 61), Age(beat(), 55, 57)], [1]),
        ([Age(beat(), 0, 61), Age(beat(activity="saving"), 0, 40)], [1]),
        ([Age(beat(), 0, 61), Age(beat(), 20, 61)], None),  # a late heartbeat is waited for
        ([Age(beat(), 0, 71), Age(beat(), 30, 71)], [1]),
        ([Age(beat(), 0, 71), Age(beat(number=2), 0, 71)], [0, 1]),
        ([Age(beat(), 0, 90), Age(beat(), 20, 90)], [0, 1]),  # for ever late
        ([Age(beat(), 0, 61), Age(beat(), 0, 59)], [0, 1]),  # all at one place
    ],
)
def test_which_ranks_are_named(ages: list[Age], expected: list[int] | None) -> None:
    fault = find_fault(ages, TIMEOUT)
    assert (None if fault is None else named(fault)) == expected


def test_a_process_without_heartbeat_is_said_to_be_gone() -> None:
    fault = find_fault([Age(beat(8), 0, 61), Age(beat(8), 58, 60)], TIMEOUT)
    assert "rank 1 on node (process 100): training after step 8" in fault
    assert "frozen or gone" in fault.lower()
    assert ALL_SAFE not in fault
    ages = [Age(beat(8, "ending"), 0, 61), Age(beat(8, "ending"), 58, 60)]
    assert find_fault(ages, TIMEOUT).endswith(f"<--\n  {ALL_SAFE}")


def test_a_start_finds_the_hang_that_ended_the_one_before(tmp_path: Path) -> None:
    """The start also finds a frozen rank 0, which told nobody."""
    assert newest_hang(tmp_path / "faults", 0.0) is None

    def report(name: str, text: str, at: float) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / REPORT).write_text(text)
        os.utime(tmp_path / name / REPORT, (at, at))

    older = find_fault([Age(beat(), 0, 61), Age(beat(activity="reading text"), 0, 62)], TIMEOUT)
    report("20261121-100000", f"rank 0: {older}\nstacks of all ranks: x\n", at=100.0)
    newer = find_fault([Age(beat(), 40, 61), Age(beat(), 0, 62)], TIMEOUT)
    report("20261121-110000", f"rank 1: {newer}\nstacks of all ranks: x\n", at=200.0)
    wrong_bits = "silent data corruption at step 7\nno update was made after step 6 <--\n"
    report("20261121-120000", wrong_bits, at=300.0)
    (tmp_path / "20261121-130000").mkdir()  # a disk that was full
    what = "rank 1: no progress for 60 s. Frozen or gone (not even a heartbeat): 0"
    where = "rank 0 on node (process 100): training after step 7, for 61 s; heartbeat 40 s ago"
    assert newest_hang(tmp_path, 150.0) == newest_hang(tmp_path, 50.0) == f"{what}; {where}"
    assert newest_hang(tmp_path, 250.0) is None


def test_ages_grow_until_a_heartbeat_and_a_progress_come() -> None:
    age = Age(beat())
    age.see(beat(), 5)
    assert (age.of_beat, age.of_progress) == (5, 5)
    age.see(beat(number=2), 5)
    assert (age.of_beat, age.of_progress) == (0, 10)
    age.see(beat(number=3, progress=2), 5)
    assert (age.of_beat, age.of_progress) == (0, 0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([1.0, 1.0, 3.0, 1.0], (2, 3.0)), ([1.0, 2.0], (1, 2.0)), ([5.0], (0, 1.0)), ([0.0, 0.0], (0, 1.0))],
)
def test_the_slowest_rank_is_compared_with_the_median(seconds, expected):
    assert slowest(seconds) == expected


def test_a_slow_rank_is_named_once_when_it_stays_slow(caplog: pytest.LogCaptureFixture) -> None:
    warning = StragglerWarning(ratio=1.5)
    with caplog.at_level(logging.WARNING):
        for step, (rank, ratio) in enumerate([(3, 2.0), (1, 2.0), (3, 2.0), (3, 1.6), (3, 1.2)]):
            warning.on_record({"step": step, "slowest_rank": rank, "slowest_rank_ratio": ratio}, None)
        assert caplog.messages == []
        for step in range(5, 10):
            warning.on_record({"step": step, "slowest_rank": 3, "slowest_rank_ratio": 1.75}, None)
    assert caplog.messages == [
        "step 7: rank 3 works 1.75 times as long as the median rank; all others wait for it"
    ]


def test_only_the_time_between_begin_and_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr("gsa_train.profiling.work_time.time.perf_counter", lambda: next(clock))
    work = WorkTime(torch.device("cpu"))
    work.end()  # without a begin
    for _ in range(2):
        work.begin()
        work.end()
    assert [work.read_and_reset().seconds for _ in range(2)] == [2 + 5, 0]


def test_a_step_is_timed_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr("gsa_train.profiling.work_time.time.perf_counter", lambda: next(clock))
    work = WorkTime(torch.device("cpu"))
    with work.part("forward_backward"), work.part("gradient_reduction"):
        pass  # from 1 to 11; the inner one takes 2 to 5
    with work.part("optimizer"):
        pass
    expected = {"forward_backward": 10 - 3, "gradient_reduction": 3, "optimizer": 4}
    assert work.read_and_reset().parts == expected
    assert set(work.read_and_reset().parts.values()) == {0}


class DeviceEvent:
    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = queue.pop(0)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.time <= DeviceEvent.now

    def elapsed_time(self, end: DeviceEvent) -> float:
        return 1000 * (end.time - self.time)


queue: list[float] = []
"""Times at which the device reaches the next events."""


def test_what_the_device_has_still_to_do_counts_at_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("it waits"))
    queue[:] = [0.0, 4.0, 5.0, 7.0]
    work = WorkTime(torch.device("cuda"))
    for name in ("forward_backward", "optimizer"):
        with work.part(name):
            pass
    DeviceEvent.now = 6.0
    nothing = dict.fromkeys(work.read_and_reset().parts, 0.0)
    queue[:] = [8.0, 9.0]
    with work.part("optimizer"):
        pass
    DeviceEvent.now = 10.0
    assert work.read_and_reset().parts == {**nothing, "optimizer": 2.0 + 1.0}
    queue[:] = [11.0, 12.0]
    with work.part("optimizer"):
        pass
    work.reset()
    DeviceEvent.now = 13.0
    assert work.read_and_reset().parts == nothing
