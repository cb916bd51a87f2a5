"""Tests a run that is killed and resumes: its account of time matches the time stamps in its logs."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.goodput.run_clock import process_began
from gsa_train.run_folder.starts import read_starts
from helpers.chaos_times import productive_by_hand
from helpers.runs import Run, kill, start

HELD = 8
COMMAND = ("logging.straggler_ratio=1e9", "data.num_workers=0", "checkpoint.async_save=false")
near = partial(pytest.approx, abs=0.4)
"""Tolerance in seconds between a time stamp of the log and the line of goodput.jsonl for the same moment."""

# It compares clocks; test_goodput_log.py and test_goodput_account.py test the rules.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def alive(run: Run) -> Any:
    return json.loads((run.folder / "alive.json").read_text())["time"]


def test_the_account_of_a_killed_run_matches_its_time_stamps(tmp_path: Path) -> None:
    """The run is killed while it blocks in step 8. It had saved at step 5, where the next process resumes."""
    run = start(tmp_path, *COMMAND, faults={"held": [[HELD, 0]]})
    (began,) = map(process_began, run.process.pids)
    run.wait_until(lambda: (tmp_path / "marks" / f"held_{HELD}").exists() and HELD - 1 in run.steps_printed())
    beaten = alive(run)
    run.wait_until(lambda: alive(run) > beaten)  # it has reported that it blocks
    kill(run)
    killed, last = time.time(), run.steps()[-1]["time"]
    run = start(tmp_path, *COMMAND)
    (began_again,) = map(process_began, run.process.pids)
    run.wait()

    account = read_account(run.folder)
    lost, records = account.lost_seconds, run.records()
    (ended,) = (each["time"] for each in records if each.get("event") == "validation")
    opened = [each["unix_seconds"] for each in read_starts(run.folder)]
    assert account.wall_seconds == near(ended - began)
    assert account.productive_seconds == near(productive_by_hand(records, opened))
    assert account.productive_seconds + sum(lost.values()) == pytest.approx(account.wall_seconds)
    assert account.ettr == pytest.approx(account.productive_seconds / account.wall_seconds)
    assert 0 < lost["repeated"] < last - began
    assert 0 < lost["detection"] <= killed - last
    assert lost["down"] >= began_again - killed
    assert lost["import"] < opened[0] - began + opened[1] - began_again

    summary, newest = json.loads((run.folder / "summary.json").read_text()), run.steps()[-1]
    assert summary["ettr"] == account.ettr
    assert summary["lost_seconds"] == pytest.approx(lost, abs=1e-3)
    assert newest["lost_seconds"]["down"] == pytest.approx(lost["down"], abs=1e-3)
    assert f"did not end by itself: after step {HELD - 1}, last sign" in run.output
    assert run.output.count("goodput: this run has lost ") == 2  # at the restart and at the end
    assert f"(ETTR {account.ettr:.1%})" in run.output

    lines = (run.folder / "goodput.jsonl").read_text()
    start(tmp_path, *COMMAND).wait()  # the run is complete
    assert (run.folder / "goodput.jsonl").read_text() == lines
