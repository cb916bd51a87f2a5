"""Tests the times of faults in `make chaos`, and its independent ETTR."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.chaos_times import Happened, ettr_by_hand, productive_by_hand, starts_in, table_of, with_parts


def step(
    number: int, time: float, phase: str = "sparse", wait: float = 0.0, seconds: float = 0.0
) -> dict[str, Any]:
    return {"step": number, "time": time, "phase": phase, "data_wait_seconds": wait, "step_seconds": seconds}


def test_steps_last_from_stamp_to_stamp_but_where_something_else_lies_between() -> None:
    records = [
        step(1, 110.0),  # the first: as long as the others of its phase
        step(2, 112.0),
        step(3, 116.0, wait=1.0),
        {"event": "checkpoint", "step": 3, "time": 117.0},
        step(4, 121.0, seconds=2.5),  # after a save
        step(5, 150.0),  # after a start
        step(6, 152.0, phase="next"),  # after the phase's begin
        step(7, 153.0, phase="next"),
        {"event": "validation", "step": 7, "time": 160.0},
    ]
    usual = (2.0 + 3.0 + 2.5) / 3
    assert productive_by_hand(records, starts=[104.0, 140.0]) == pytest.approx(7.5 + 2 * usual + 1.0 + 1.0)
    assert ettr_by_hand(records, [104.0, 140.0], began=100.0) == pytest.approx((9.5 + 2 * usual) / 60)


def test_a_fault_has_the_parts_of_the_start_after_it(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "began": 10.0, "seconds": {"import": 2.0}},
        {"kind": "steps", "step": 1, "seconds": {"import": 2.0, "model": 1.0, "first_step": 0.5}},
        {
            "kind": "steps",
            "step": 9,
            "seconds": {"import": 2.0, "model": 1.0, "first_step": 0.5, "save": 1.0},
        },
        {"kind": "lost", "step": 9, "seconds": {"import": 2.0}},
        {"kind": "start", "step": 5, "began": 30.0, "seconds": {"import": 3.0}},
        {"kind": "steps", "step": 6, "seconds": {"import": 3.0, "model": 1.5, "first_step": 0.7}},
    ]
    path = tmp_path / "goodput.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = starts_in(path)
    assert starts == [
        {"began": 10.0, "import": 2.0, "model": 1.0, "first_step": 0.5},
        {"began": 30.0, "import": 3.0, "model": 1.5, "first_step": 0.7},
    ]
    killed = Happened("rank killed", 9, 20.0, detection_seconds=4.0, seconds=16.0, steps_lost=4, start=1)
    full = Happened("disk full", 11, 40.0, detection_seconds=1.0, seconds=2.0)
    with_parts([killed, full], starts)
    assert killed.parts["down"] == 6.0
    head, first, second = (" ".join(line.split()) for line in table_of([killed, full], 10.0))
    assert head.startswith("fault at step detected down import")
    assert first == "rank killed 10 9 4.0 6.0 3.0 0.0 0.0 0.0 0.0 1.5 0.0 0.7 16.0 4"
    assert second == "disk full 30 11 1.0 2.0 0"
