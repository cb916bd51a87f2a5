"""Tests that a hang at the end of a run is named, and ends with the run's exit code."""

import json
from pathlib import Path

import pytest

from gsa_train.reliability.hang_watchdog import ALL_SAFE, REPORT, newest_hang
from helpers.runs import run_script

pytestmark = pytest.mark.nightly  # it waits for limits; test_watch.py and test_hang_limit.py test the rules
SCRIPT = Path(__file__).parents[1] / "helpers" / "frozen_at_end.py"


def test_a_rank_that_freezes_at_the_end(tmp_path: Path) -> None:
    """Without the watch the other rank waits for a collective's limit, here five minutes."""
    command = [str(SCRIPT), str(tmp_path / "cases")]
    on_cpus = {"CUDA_VISIBLE_DEVICES": ""}
    output = run_script(command, tmp_path / "log", ranks=1, launcher="python", environment=on_cpus)
    assert json.loads(output.splitlines()[-1]) == {"before": 13, "between": 75, "never": 0}
    told = {
        case: (tmp_path / "cases" / case / "rank_0.err").read_text()
        for case in ("before", "between", "never")
    }

    (report,) = (tmp_path / "cases" / "before" / "faults").glob(f"*/{REPORT}")
    assert report.read_text() in told["before"]
    assert "Frozen or gone (not even a heartbeat): 1" in told["before"]
    assert f"  {ALL_SAFE}\n" in report.read_text()
    hang = newest_hang(tmp_path / "cases" / "before" / "faults", 0.0)
    assert "ending after step 7" in hang.split("; rank 1 on ")[1]

    assert (
        f"it could not leave its process group within 2 s; a peer hangs; stacks: {tmp_path}"
        in told["between"]
    )
    assert told["between"].endswith(f"; {ALL_SAFE}\n")
    (stacks,) = (tmp_path / "cases" / "between" / "faults").glob("*/rank_00000.txt")
    assert "leave_world" in stacks.read_text()

    assert told["never"] == ""
