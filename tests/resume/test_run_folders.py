"""What a start does with a run folder that already holds a run. Plain `python launch/pretrain.py`, one rank."""

from __future__ import annotations

import pytest

from gsa_train.run.starts import read_starts
from helpers.runs import SMALL, Run, kill, start

pytestmark = pytest.mark.slow


def start_in(old_run: Run, *overrides: str) -> Run:
    return start(old_run.folder.parent, *SMALL, *overrides, launcher="python")


def refusal(run: Run) -> str:
    """What a start that ends with exit code 2 wrote; not a stack of calls."""
    output = run.wait(expected=2).output
    assert "Traceback" not in output
    return output


def test_a_finished_run_ends_again_and_changes_nothing(old_run):
    before = {path: path.stat().st_mtime_ns for path in old_run.checkpoints.rglob("*")}
    summary = (old_run.folder / "summary.json").read_text()
    records = old_run.steps()
    again = start_in(old_run).wait()
    assert "is complete" in again.output
    assert [start["step"] for start in read_starts(again.folder)] == [0, 20]
    assert read_starts(again.folder)[1]["layout"].startswith("1 rank on cpu")
    assert again.steps() == records
    assert (again.folder / "summary.json").read_text() == summary
    assert {path: path.stat().st_mtime_ns for path in again.checkpoints.rglob("*")} == before


def test_no_resume_starts_at_step_1_and_moves_the_old_outputs_aside(old_run):
    records = old_run.records()
    fresh = start_in(old_run, "--no-resume")
    fresh.wait_until(lambda: "/20  warm-up" in fresh.output)
    kill(fresh)
    assert fresh.steps()[0]["step"] == 1
    assert fresh.latest == ""
    (previous,) = (fresh.folder / "previous").iterdir()
    assert [len(read_starts(folder)) for folder in (fresh.folder, previous)] == [1, 1]
    assert Run(previous, None, old_run.log, "").records() == records
    assert (previous / "checkpoints" / "latest").read_text() == "step_00000020"
    assert (previous / "summary.json").exists()


def test_resume_from_another_run_leaves_that_one_alone(old_run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in old_run.folder.rglob("*")}
    options = ("--resume-from", str(old_run.checkpoints / "step_00000015"))
    branch = start(tmp_path, *SMALL, *options, name="branch", launcher="python")
    branch.wait_until(lambda: len(branch.steps()) >= 3)
    kill(branch)
    assert branch.series("step")[:3] == [16, 17, 18]
    for key in ("loss", "grad_norm", "tokens"):
        assert branch.series(key)[:3] == old_run.series(key)[15:18]
    assert {path: path.stat().st_mtime_ns for path in old_run.folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gsa.indexer_dim=16", "gsa.indexer_dim = 16: the checkpoint has 32"),
        ("phases.0.steps=12", "began at step 10; in the config phase 1 is sparse and begins at step 12"),
        ("phases.1.train=base", "phases.1.train = base, which its optimizer does not fit"),
    ],
)
def test_another_model_or_other_phases_are_refused(old_run, override, expected):
    message = refusal(start_in(old_run, override))
    assert expected in message
    assert "--no-resume" in message  # the way out
