"""Tests a start whose newest checkpoints are damaged: it uses an intact one, reports it, and loses no batch."""

import shutil
from pathlib import Path

import pytest

from helpers.runs import STEPS, finished, start

pytestmark = pytest.mark.slow


def test_a_run_goes_back_to_its_newest_intact_checkpoint_and_says_so(tmp_path: Path) -> None:
    original = finished()
    shutil.copytree(original.folder, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    flipped = checkpoints / "step_00000020" / "__0_0.distcp"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut = checkpoints / "step_00000015" / "__0_1.distcp"
    cut.write_bytes(cut.read_bytes()[:-1000])

    run = start(tmp_path, launcher="python").wait()
    assert "checkpoint step_00000020 is damaged: __0_0.distcp has checksum" in run.output
    assert "checkpoint step_00000015 is damaged: __0_1.distcp has" in run.output
    assert "going back to the newest intact checkpoint, step_00000010" in run.output
    damaged = [record for record in run.records() if record.get("event") == "checkpoint_damaged"]
    assert [(each["checkpoint_name"], each["step"]) for each in damaged] == [
        ("step_00000020", 10),
        ("step_00000015", 10),
    ]
    assert {path.name for path in checkpoints.iterdir()} == {
        "latest",
        *(f"step_{step:08d}" for step in (5, 10, 15, 20)),
        "step_00000015.damaged",
        "step_00000020.damaged",
    }
    assert (checkpoints / "step_00000020.damaged" / "__0_0.distcp").read_bytes() == content
    assert run.latest == "step_00000020"
    assert run.series("step") == list(range(1, STEPS + 1))
    for key in ("loss", "indexer_kl", "grad_norm", "tokens"):
        assert run.series(key) == original.series(key)
