"""Tests ETTR and lost time of synthetic logs with sums by hand, and launch/goodput.py."""

import json
import re
from typing import Any

import pytest

from gsa_train.commands import goodput
from gsa_train.metrics.goodput.account import COMPLETE, INTERRUPTED, LOSSES, STOPPED, Account, Accounting
from gsa_train.process.exit_codes import REFUSED

Line = dict[str, Any]


def line(event: str, at: float, step: int, more: Line | None = None, **seconds: float) -> Line:
    """Return a log line; `more` has further keys, `seconds` is by activity."""
    return {"kind": event, "time": at, "step": step, "phase": "sparse", "seconds": seconds, **(more or {})}


def start(began: float, at: float, step: int, **seconds: float) -> Line:
    return line("start", at, step, {"began": began}, **seconds)


def account(*lines: Line) -> Account:
    found = Accounting(lines).account()
    assert found.wall_seconds == pytest.approx(found.productive_seconds + sum(found.lost_seconds.values()))
    return found


def lost(found: Account) -> dict[str, float]:
    return {name: round(seconds, 9) for name, seconds in found.lost_seconds.items() if abs(seconds) > 1e-9}


def killed_and_resumed() -> list[Line]:
    """Return the log of two processes of a run. The first process saved step 15 and was killed in step 22. Its main
    thread made its last progress 4 s before the kill. The second process began 10 s after the kill, and continued
    after step 15."""
    first, second = {"import": 5.0}, {"import": 4.0, "checkpoint": 2.0}
    return [
        start(1000, 1005, 0, **first),
        line("steps", 1008, 1, **first, first_step=3.0),
        line("steps", 1018, 11, **first, first_step=3.0, training=10.0),
        line("steps", 1022, 15, **first, first_step=3.0, training=14.0),
        line("steps", 1043, 20, **first, first_step=3.0, training=19.0, save=16.0),
        line("lost", 1050, 21, {"progress": 1046}, **first, first_step=3.0, training=22.0, save=16.0),
        start(1060, 1066, 15, **second),
        line("steps", 1070, 16, **second, first_step=4.0),
        line("end", 1084, 30, {"reason": COMPLETE}, **second, first_step=4.0, training=14.0),
    ]


def test_a_kill_costs_the_steps_since_the_checkpoint_and_the_time_between() -> None:
    found = account(*killed_and_resumed())
    assert found.wall_seconds == 84
    # Kept steps: 15 of the first process and 15 of the second, 1 s each.
    assert found.productive_seconds == 30
    assert found.ettr == 30 / 84
    assert lost(found) == {
        "import": 9.0,
        "checkpoint": 2.0,
        "first_step": 2.0 + 3.0,
        "save": 16.0,
        "repeated": 5.0 + 3.0,  # steps 16 to 20, then up to the last progress
        "detection": 4.0,
        "down": 10.0,
    }
    first, second = found.starts
    assert (first.ended, first.last_step, first.repeated_steps) == ("lost", 21, 6)
    assert (first.detection_seconds, second.down_seconds, second.start_up_seconds) == (4.0, 10.0, 6.0)
    assert (second.ended, second.repeated_steps) == (COMPLETE, 0)


RARE = {"text": 2.0, "stragglers": 0.5, "folding": 0.5}


@pytest.mark.parametrize(
    ("first", "last", "productive", "expected"),
    [
        # A checkpoint between two lines divides their time: its share of the steps is kept.
        (5.0, [line("steps", 15, 11, first_step=5.0, training=10.0), start(15, 15, 4)], 1 + 3,
         {"first_step": 4.0, "repeated": 7.0}),
        # Waits for text and stragglers are not productive. Rare activities count as `other`.
        (1.0, [line("steps", 14, 11, first_step=1.0, training=10.0, **RARE)], 11,
         {"text": 2.0, "stragglers": 0.5, "other": 0.5}),
    ],
)  # fmt: skip
def test_what_is_productive(first: float, last: list[Line], productive: int, expected: Line) -> None:
    found = account(start(0, 0, 0), line("steps", first, 1, first_step=first), *last)
    assert (found.productive_seconds, lost(found)) == (productive, expected)


def test_two_kills_in_the_same_steps_cost_them_twice() -> None:
    found = account(
        start(0, 0, 0),
        line("steps", 1, 1, first_step=1.0),
        line("steps", 10, 10, first_step=1.0, training=9.0),
        line("lost", 10, 10, {"progress": 10}, first_step=1.0, training=9.0),
        start(12, 12, 5),
        line("steps", 15, 6, first_step=3.0),
        line("steps", 18, 9, first_step=3.0, training=3.0),
        line("lost", 18, 9, {"progress": 18}, first_step=3.0, training=3.0),
        start(20, 20, 5),
        line("steps", 23, 6, first_step=3.0),
        line("steps", 24, 7, first_step=3.0, training=1.0),
    )
    assert found.productive_seconds == 7
    assert lost(found) == {"down": 4.0, "repeated": 5.0 + 4.0, "first_step": 4.0}
    assert [each.repeated_steps for each in found.starts] == [5, 4, 0]


ENDS = {COMPLETE: 0, INTERRUPTED: 0, STOPPED: 990, "stopped by the monitor": 990, "corrupted": 990}


@pytest.mark.parametrize("reason", ENDS)
def test_the_time_until_the_next_start_is_lost_except_by_the_users_choice(reason: str) -> None:
    """If Slurm stopped the run with SIGTERM, the time until the next start counts as lost, because the run waits in the
    queue. The time does not count if the user pressed Ctrl-C, or extended a complete run."""
    found = account(
        start(0, 0, 0),
        line("steps", 1, 1, first_step=1.0),
        line("end", 10, 10, {"reason": reason}, first_step=1.0, training=9.0),
        start(1000, 1002, 10, model=2.0),
        line("steps", 1003, 11, model=2.0, first_step=1.0),
    )
    assert found.wall_seconds == 13 + ENDS[reason]
    assert found.starts[1].down_seconds == found.lost_seconds["down"] == ENDS[reason]
    assert found.lost_seconds["model"] == 2


def test_lines_that_a_full_disk_has_cost_change_no_sum() -> None:
    lines = killed_and_resumed()
    whole, found = account(*lines), account(*lines[:2], *lines[3:])
    assert (found.productive_seconds, found.lost_seconds) == (whole.productive_seconds, whole.lost_seconds)


def test_without_lines_there_is_nothing() -> None:
    found = account()
    assert (found.wall_seconds, found.ettr, found.starts, found.step_seconds) == (0, 0, [], None)
    assert set(found.lost_seconds) == set(LOSSES)
    assert account(line("steps", 5, 5, training=5.0)).wall_seconds == 0


@pytest.mark.parametrize("seconds", [15.0, 86_400.0])
def test_a_clock_set_back_between_starts_costs_the_time_between_them_and_no_more(seconds: float) -> None:
    lines = killed_and_resumed()
    second = next(index for index, each in enumerate(lines) if each["time"] > 1050)
    moved = [{**each, "time": each["time"] - seconds} for each in lines[second:]]
    moved[0]["began"] -= seconds
    before, after = account(*lines), account(*lines[:second], *moved)
    down = lost(before)["down"]
    assert after.wall_seconds == before.wall_seconds - down
    assert after.productive_seconds == before.productive_seconds
    assert lost(after) == {name: value for name, value in lost(before).items() if name != "down"}


def test_the_command_shows_the_account_and_refuses_a_folder_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["goodput.py", "--run", str(tmp_path)])
    assert goodput.main() == REFUSED
    assert f"{tmp_path}: no goodput.jsonl with steps in it" in capsys.readouterr().err
    (tmp_path / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in killed_and_resumed()))
    assert goodput.main() == 0
    said = re.sub(" +", " ", capsys.readouterr().out)
    assert f"{tmp_path}: ETTR 35.71% over 1m24s and 2 starts" in said
    for row in ("productive 30s 35.71%", "steps done again 8.0s 9.52%", "1 0 0.0s 5.0s lost 21 4.0s 6"):
        assert row in said
