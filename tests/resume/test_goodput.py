"""Tests a run that is killed and resumes: its ETTR equals the value from the time stamps in its logs."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import pytest

from gsa_train.metrics.goodput.account import START_UP
from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.goodput.run_clock import process_began
from gsa_train.run_folder.starts import read_starts
from helpers.runs import STEPS, Run, kill, start

SAVED, HELD = 5, 8
PHASE_STEPS = 10
NEAR_SECONDS = 0.4
"""Tolerance between a time stamp of the log and the line of goodput.jsonl for the same moment."""
COMMAND = ("logging.straggler_ratio=1e9", "data.num_workers=0", "checkpoint.async_save=false")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
]  # it compares clocks; test_goodput_log.py tests the rules


@dataclass
class Process:
    began: float
    """Start in Unix seconds, by the system."""
    opened: float
    """Start by starts.jsonl."""
    records: list[dict[str, Any]]
    """metrics.jsonl of this process, with its own steps and events."""

    def step(self, number: int) -> dict[str, Any]:
        (found,) = (each for each in self.records if each["step"] == number and "event" not in each)
        return found

    def stall(self, number: int) -> float:
        """Return the stall of the save after a step: both are logged at their end, because the run waits for saves."""
        found = [
            each for each in self.records if each["step"] == number and each.get("event") == "checkpoint"
        ]
        return sum(each["time"] - self.step(number)["time"] for each in found)

    def seconds(self, number: int) -> float:
        """Return the seconds of a later step: between two time stamps, without other events in between."""
        here, before = self.step(number), self.step(number - 1)
        between: float = here["time"] - before["time"] - self.stall(number - 1)
        return between - here["data_wait_seconds"]


@dataclass
class Story:
    run: Run
    first: Process
    second: Process
    killed: float
    ended: float
    """End of the run, when its last validation was logged."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Kill the run while it blocks in step 8; it had saved at step 5, where the next process resumes."""
    folder = tmp_path_factory.mktemp("goodput")
    run = start(folder, *COMMAND, faults={"held": [[HELD, 0]]})
    (began,) = map(process_began, run.process.pids)
    run.wait_until(lambda: (folder / "marks" / f"held_{HELD}").exists() and HELD - 1 in run.steps_printed())
    beaten = alive(run)["time"]
    run.wait_until(lambda: alive(run)["time"] > beaten)  # it has reported that it blocks
    kill(run)
    killed, records = time.time(), run.records()

    run = start(folder, *COMMAND)
    (began_again,) = map(process_began, run.process.pids)
    run.wait()
    opened = [each["unix_seconds"] for each in read_starts(run.folder)]
    first = Process(began, opened[0], records)
    second = Process(began_again, opened[1], [each for each in run.records() if each["time"] > opened[1]])
    ended = second.records[-1]["time"]
    (validated,) = (each["time"] for each in run.records() if each.get("event") == "validation")
    assert validated <= ended
    return Story(run, first, second, killed, validated)


def alive(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "alive.json").read_text())
    return found


def by_hand(story: Story) -> tuple[float, float, float]:
    """Return productive time, time of repeated steps up to the last record, and wall time."""
    first, second = story.first, story.second
    of_warm_up = {number: first.seconds(number) for number in range(2, HELD)}
    again = {number: second.seconds(number) for number in range(SAVED + 2, PHASE_STEPS + 1)}
    sparse = {number: second.seconds(number) for number in range(PHASE_STEPS + 2, STEPS + 1)}
    usual = statistics.fmean([*of_warm_up.values(), *again.values()])
    firsts = [
        min(first.step(1)["step_seconds"], usual),
        min(second.step(SAVED + 1)["step_seconds"], usual),
        min(second.step(PHASE_STEPS + 1)["step_seconds"], statistics.fmean(sparse.values())),
    ]
    kept = sum(of_warm_up[number] for number in range(2, SAVED + 1))
    productive = kept + sum(again.values()) + sum(sparse.values()) + sum(firsts)
    repeated = sum(of_warm_up[number] for number in range(SAVED + 1, HELD))
    return productive, repeated, story.ended - first.began


def test_the_ettr_matches_the_logs_time_stamps(story: Story) -> None:
    account = read_account(story.run.folder)
    assert account is not None
    productive, repeated, wall = by_hand(story)
    assert account.wall_seconds == pytest.approx(wall, abs=NEAR_SECONDS)
    assert account.productive_seconds == pytest.approx(productive, abs=NEAR_SECONDS)
    assert account.ettr == pytest.approx(productive / wall, abs=NEAR_SECONDS / wall)
    assert account.productive_seconds + sum(account.lost_seconds.values()) == pytest.approx(
        account.wall_seconds
    )

    lost, first, second = account.lost_seconds, story.first, story.second
    after_save = first.step(SAVED)["time"] + first.stall(SAVED)
    waits = sum(first.step(number)["data_wait_seconds"] for number in range(SAVED + 1, HELD))
    gone = lost["repeated"] + lost["detection"] + lost["down"] + waits
    assert gone == pytest.approx(second.began - after_save, abs=NEAR_SECONDS)
    assert lost["repeated"] == pytest.approx(repeated, abs=NEAR_SECONDS)
    # The process was last seen between the block and its end.
    last_step = first.step(HELD - 1)["time"]
    assert 0 < lost["detection"] <= story.killed - last_step
    assert lost["down"] >= second.began - story.killed
    stalls = sum(
        process.stall(step) for process, step in [(first, 5), (second, 10), (second, 15), (second, STEPS)]
    )
    assert lost["save"] == pytest.approx(stalls, abs=NEAR_SECONDS)
    start_up = sum(
        process.step(step)["time"] - process.step(step)["step_seconds"] - process.began
        for process, step in ((first, 1), (second, SAVED + 1))
    )
    assert sum(lost[name] for name in START_UP) == pytest.approx(start_up, abs=NEAR_SECONDS)
    assert lost["import"] < sum(process.opened - process.began for process in (first, second))


def test_records_summary_and_console_say_it(story: Story) -> None:
    account = read_account(story.run.folder)
    assert account is not None
    summary = json.loads((story.run.folder / "summary.json").read_text())
    assert summary["ettr"] == account.ettr
    assert summary["wall_seconds"] == pytest.approx(account.wall_seconds, abs=1e-3)
    assert summary["lost_seconds"] == pytest.approx(account.lost_seconds, abs=1e-3)
    for record in story.run.steps():
        assert 0 < record["ettr"] < 1
    assert f"did not end by itself: after step {HELD - 1}, last sign" in story.run.output
    newest = story.run.steps()[-1]
    assert newest["lost_seconds"]["down"] == pytest.approx(account.lost_seconds["down"], abs=1e-3)
    assert "validation" not in newest["lost_seconds"]  # the validation comes after it
    said = [line for line in story.run.output.splitlines() if line.startswith("goodput: this run has lost ")]
    assert len(said) == 2  # at the restart and at the end
    assert f"(ETTR {account.ettr:.1%})" in said[1]
    (restart,) = [line for line in story.run.output.splitlines() if line.startswith("start-up ")]
    assert "import " in restart
    assert "reading checkpoints " in restart


def test_a_complete_run_that_is_started_again_changes_nothing(story: Story) -> None:
    lines = (story.run.folder / "goodput.jsonl").read_text()
    before = read_account(story.run.folder)
    start(story.run.folder.parent, *COMMAND).wait()
    assert (story.run.folder / "goodput.jsonl").read_text() == lines
    assert read_account(story.run.folder) == before
