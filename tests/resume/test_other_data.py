"""Tests a start whose data differs from its checkpoint's, or cannot be read."""

import shutil
from pathlib import Path

import pytest

from helpers.runs import REPOSITORY, Run, start

pytestmark = pytest.mark.slow

SAMPLE = REPOSITORY / "data" / "sample"
LONGER = "phases.1.steps=12"


def start_in(old_run: Run, *overrides: str) -> Run:
    return start(old_run.folder.parent, LONGER, *overrides, launcher="python")


def message_of(run: Run, code: int) -> str:
    output = run.wait(expected=code).output
    assert "Traceback" not in output
    return output


def test_other_data_is_refused_and_then_accepted(old_run: Run) -> None:
    other = f"data.train_dir={SAMPLE / 'validation'}"
    message = message_of(start_in(old_run, other), 2)
    assert "step_00000020 cannot go on with this data:" in message
    assert "saved with manifest_fingerprint=" in message
    assert "add --accept-new-data" in message

    records = old_run.steps()
    accepted = start_in(old_run, other, "--accept-new-data").wait()
    assert "--accept-new-data: the text starts at its beginning" in accepted.output
    assert accepted.steps()[:20] == records
    assert accepted.series("step")[20:] == [21, 22]
    assert accepted.series("tokens")[21] == 22 * 4 * 64
    assert accepted.series("data_skipped_documents") == [0] * 22


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    run = start(tmp_path, f"data.tokenizer={REPOSITORY / 'README.md'}", launcher="python")
    assert "README.md' is not a sentencepiece model" in message_of(run, 2)


def test_text_that_fails_on_the_way_ends_the_run_with_its_name(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE / "train", tmp_path / "train")
    for shard in sorted((tmp_path / "train").rglob("*.zst"))[2:]:
        shard.write_bytes(shard.read_bytes()[:-100])
    few = [f"phases.{phase}.{steps}" for phase in (0, 1) for steps in ("steps=2", "warmup_steps=1")]
    options = (*few, f"data.train_dir={tmp_path / 'train'}", "data.num_workers=1")
    message = message_of(start(tmp_path, *options, launcher="python"), 1)
    assert "rank 0: the text failed: shard" in message
    assert ".jsonl.zst is truncated or corrupt after" in message

    run = start(tmp_path, *options, "data.on_bad_shard=skip", name="skipping", launcher="python").wait()
    assert run.series("data_skipped_shards")[-1] >= 1
    assert "is truncated or corrupt after" in run.output
