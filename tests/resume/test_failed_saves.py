"""Tests checkpoint saves that fail, mostly because one rank's files cannot grow. The run reports failed saves, tries
again, and stops after too many failures in a row. Failed saves do not change training."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import STEPS, Run, finished, numbers_of, start

COMMAND = ("checkpoint.retry_after_steps=1", "checkpoint.save_retries=1")
RANKS = 2

pytestmark = pytest.mark.slow


REASON = r"rank 1: .*__1_\d\.distcp: .*File too large"


@dataclass
class Failing:
    run: Run
    """The run, which ended after two failed saves in a row."""
    saved_step: int
    """Step of the only checkpoint, which was a second attempt."""
    failed: list[dict[str, Any]]
    names: list[str]
    """Names in the folder of checkpoints after the run."""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Failing:
    """Let all saves of rank 1 fail, except the second attempt of the first save."""
    faults = {"failing_saves": [1, [0, 2, 3]], "saves_end": True}
    run = start(tmp_path_factory.mktemp("failing"), *COMMAND, ranks=RANKS, faults=faults).wait(expected=3)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    saved_step = int(run.latest.removeprefix("step_"))
    return Failing(run, saved_step, run.events("checkpoint_failed"), names)


def test_a_failure_of_one_rank_is_everyones_and_the_next_try_saves_a_later_step(failing: Failing) -> None:
    first = failing.failed[0]
    assert (first["step"], first["checkpoint_failures"]) == (5, 1)
    assert re.match(REASON, first["checkpoint_error"])
    assert f"step 5 could not be saved: {first['checkpoint_error']}; next try at step" in failing.run.output
    assert failing.saved_step == 7  # the failure of step 5 was reported after step 6
    (saved,) = failing.run.events("checkpoint")
    assert saved["step"] == failing.saved_step
    assert min(saved["checkpoint_stall_seconds"], saved["checkpoint_save_seconds"]) > 0


def test_failures_in_a_row_stop_the_run_and_it_goes_on_as_if_nothing_had_failed(failing: Failing) -> None:
    last = failing.failed[1:]
    assert [each["checkpoint_failures"] for each in last] == [1, 2]
    assert last[0]["step"] == 10
    assert "2 saves in a row failed (checkpoint.save_retries = 1)" in failing.run.output
    assert failing.names == ["latest", f"step_{failing.saved_step:08d}"]
    resumed = start(failing.run.folder.parent, *COMMAND, ranks=RANKS).wait()
    assert f"resuming from {failing.run.checkpoints}/step_{failing.saved_step:08d}" in resumed.output
    assert numbers_of(resumed.records(), ["checkpoint_failed"]) == numbers_of(finished(ranks=RANKS).records())
    assert resumed.latest == f"step_{STEPS:08d}"


def test_a_rank_that_cannot_tell_the_others_ends_the_run_before_the_next_save(tmp_path: Path) -> None:
    """The other ranks' threads would wait two hours for this rank's thread."""
    faults = {"lost_saves": [1, [1]]}
    run = start(tmp_path, ranks=RANKS, faults=faults).wait(expected=1)
    assert (
        "SaveLost: rank 1: how the save of step 10 ended could not be agreed on by all ranks: Memory"
        in run.output
    )
    assert 10 <= run.steps()[-1]["step"] < 15
    assert run.latest == "step_00000005"
    resumed = start(tmp_path, ranks=RANKS).wait()
    assert f"resuming from {run.checkpoints}/step_00000005" in resumed.output
    assert numbers_of(resumed.records()) == numbers_of(finished(ranks=RANKS).records())
