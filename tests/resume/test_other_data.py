"""Tests text that fails during a run."""

import shutil
from pathlib import Path

import pytest

from helpers.runs import REPOSITORY, start

pytestmark = pytest.mark.slow

SAMPLE = REPOSITORY / "data" / "sample"


def test_text_that_fails_on_the_way_ends_the_run_with_its_name(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE / "train", tmp_path / "train")
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
