"""Tests whole runs with a batch ramp: kills, and resumes inside the ramp at another number of ranks."""

from pathlib import Path

import pytest

from helpers.runs import ALL_KEYS, Run, kill, numbers_of, start, train

pytestmark = pytest.mark.slow

STAGES = "[{until_tokens: 300, global_batch_size: 2}, {until_tokens: 1200, global_batch_size: 4}]"
OPTIONS = (
    *(*ALL_KEYS, "train.micro_batch_size=1", "train.global_batch_size=8", f"train.batch_ramp={STAGES}"),
    *("checkpoint.every_steps=2", "checkpoint.async_save=false", "train.iterations_to_skip=[9]"),
)
SIZES = [2, 2, 2, 4, 4, 4, 4, 8, 8, 8]
"""384 tokens after the first stage, 1408 after the second."""


def killed_at(folder: Path, name: str, step: int, ranks: int) -> Run:
    run = start(folder, *OPTIONS, name=name, ranks=ranks)
    run.wait_until(lambda: run.latest == f"step_{step:08d}")
    kill(run)
    return run


def test_a_ramp_resumes_bit_for_bit_and_at_another_number_of_ranks(tmp_path: Path) -> None:
    whole = train(tmp_path, *OPTIONS, name="whole")
    assert whole.series("global_batch_size") == SIZES[:8] + SIZES[9:]
    tokens = [64 * sum(SIZES[: step + 1]) for step in range(8)]
    assert whole.series("tokens") == [*tokens, tokens[-1] + 64 * 8]  # step 9 is read and skipped
    killed_at(tmp_path, "killed", 4, ranks=1)
    resumed = train(tmp_path, *OPTIONS, name="killed")
    assert numbers_of(resumed.records()) == numbers_of(whole.records())

    killed_at(tmp_path, "more ranks", 2, ranks=1)
    killed = start(tmp_path, *OPTIONS, name="more ranks", ranks=2)
    killed.wait_until(lambda: killed.latest == "step_00000006")
    kill(killed)
    other = train(tmp_path, *OPTIONS, name="more ranks", ranks=1)
    for key in ("step", "data_checksum", "tokens", "lr", "global_batch_size"):
        assert other.series(key) == whole.series(key), key
    assert other.series("loss") == pytest.approx(whole.series("loss"), rel=1e-5)
