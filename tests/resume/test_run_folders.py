"""Tests `python launch/pretrain.py` in a folder that already contains a run. Also tests runs whose folder is removed,
and runs whose training text cannot be read."""

import json
import shutil
from typing import Any

import pytest

from gsa_train.run_folder.starts import read_starts
from helpers.damage import cut
from helpers.run_contents import contents
from helpers.runs import QUICK, REPOSITORY, STEPS, Run, finished, kill, start, train

pytestmark = pytest.mark.slow
REFUSED_BY_WANDB = ("logging.wandb=offline", "logging.wandb_project=no/such:project")


def start_in(old_run: Run, *overrides: str, **options: Any) -> Run:
    return start(old_run.folder.parent, *overrides, launcher="python", **options)


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


def test_batches_left_out_cost_no_exit_code(tmp_path):
    """A run that skips a batch has no n-gram baselines, which would come from other text than its own."""
    options = (*QUICK, "train.iterations_to_skip=[2]", "evaluate.ngram_baselines=true")
    first = train(tmp_path, *options, launcher="python")
    summary = json.loads((first.folder / "summary.json").read_text())
    assert summary["unigram_perplexity"] is summary["bigram_perplexity"] is None
    assert (
        "no n-gram baselines: the run trained on 36 sequences, and its text is at number 40" in first.output
    )


def test_resume_from_another_run_leaves_that_one_alone(old_run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in old_run.folder.rglob("*")}
    options = ("--resume-from", str(old_run.checkpoints / "step_00000015"))
    branch = start(tmp_path, *options, name="branch", launcher="python")
    branch.wait_until(lambda: len(branch.steps()) >= 3)
    kill(branch)
    assert branch.series("step")[:3] == [16, 17, 18]
    for key in ("loss", "grad_norm", "tokens"):
        assert branch.series(key)[:3] == old_run.series(key)[15:18]
    assert {path: path.stat().st_mtime_ns for path in old_run.folder.rglob("*")} == before


def test_a_refused_resume_of_two_ranks_leaves_no_trace(old_run, tmp_path):
    """Folders do not change, and the message comes once. test_refused_starts.py tests more reasons."""
    options = ("--resume-from", str(old_run.checkpoints / "step_00000015"), *REFUSED_BY_WANDB)
    before = contents(old_run.folder)
    new = start(tmp_path, *options, name="new", ranks=2).wait(expected=2)
    old = start(tmp_path, *options, ranks=2).wait(expected=2)
    for run in (new, old):
        assert run.output.count("logging.wandb = offline: Weights & Biases did not start") == 1
        assert "Traceback" not in run.output
    assert not new.folder.exists()
    assert contents(old.folder) == before


def test_what_a_refused_start_passes_over_is_told_by_the_one_that_goes_on(old_run):
    cut(old_run.checkpoints / "step_00000020" / "__0_0.distcp")
    unfinished = old_run.checkpoints / ".tmp_step_00000025"
    unfinished.mkdir()
    before = contents(old_run.folder)
    start_in(old_run, "gsa.indexer_dim=32").wait(expected=2)
    assert contents(old_run.folder) == before
    again = start_in(old_run).wait()
    assert (old_run.checkpoints / "step_00000020.damaged").is_dir()
    assert not unfinished.exists()
    events = [record for record in again.records() if record.get("event") == "checkpoint_damaged"]
    assert [record["checkpoint_name"] for record in events] == ["step_00000020"]


def test_a_run_whose_folder_is_removed_saves_all_it_knows_and_goes_on_by_the_same_command(tmp_path):
    original = finished()
    fault = {"removed_folder": [8, str(tmp_path / "run")]}
    removed = start(tmp_path, launcher="python", faults=fault).wait(expected=75)
    assert "metrics.jsonl was removed, moved or replaced during the run" in removed.output
    assert "stopped by the removal of its run folder after step " in removed.output
    assert "Traceback" not in removed.output
    assert removed.latest in ("step_00000008", "step_00000009")
    again = start(tmp_path, launcher="python").wait()
    assert again.series("step") == list(range(1, STEPS + 1))
    for key in ("loss", "indexer_kl", "grad_norm", "tokens"):
        assert again.series(key) == original.series(key)


def test_text_that_fails_on_the_way_ends_the_run_with_its_name(tmp_path):
    shutil.copytree(REPOSITORY / "data" / "sample" / "train", tmp_path / "train")
    for shard in sorted((tmp_path / "train").rglob("*.zst"))[2:]:
        shard.write_bytes(shard.read_bytes()[:-100])
    few = [f"phases.{phase}.{steps}" for phase in (0, 1) for steps in ("steps=2", "warmup_steps=1")]
    options = (*few, f"data.train_dir={tmp_path / 'train'}", "data.num_workers=1")
    message = start(tmp_path, *options, launcher="python").wait(expected=1).output
    assert "Traceback" not in message
    assert "rank 0: the text failed: shard" in message
    assert ".jsonl.zst is truncated or corrupt after" in message

    run = start(tmp_path, *options, "data.on_bad_shard=skip", name="skipping", launcher="python").wait()
    assert run.series("data_skipped_shards")[-1] >= 1
    assert "is truncated or corrupt after" in run.output
