"""Tests that a DeepSpeed run resumes from its checkpoint bit for bit, also across phases, and that megatron's can."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import Run, numbers_of, train

pytestmark = pytest.mark.slow

SHORT = (
    "train.micro_batch_size=1",  # two on each of two ranks
    *(f"phases.{number}.{field}" for number in range(2) for field in ("steps=3", "warmup_steps=1")),
    "checkpoint.every_steps=2",
    "evaluate.every_steps=3",
    "evaluate.split_by_source=false",
)
ZERO = ("parallel.strategy=deepspeed", "parallel.zero_stage=2")


def records_of(run: Run, after: int) -> list[dict[str, Any]]:
    """Return steps and validations after a step, without times."""
    return numbers_of(record for record in run.records() if record["step"] > after)


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *SHORT, *ZERO, ranks=2)
    assert whole.series("step") == [1, 2, 3, 4, 5, 6]
    from_warm_up = ("--resume-from", str(whole.checkpoints / "step_00000002"))
    resumed = train(tmp_path / "resumed", *SHORT, *ZERO, *from_warm_up, ranks=2)
    assert resumed.series("step") == [3, 4, 5, 6]
    assert records_of(resumed, after=2) == records_of(whole, after=2)

    # The first loss shows the weights, the second one shows the optimizer's state.
    from_sparse = ("--resume-from", str(whole.checkpoints / "step_00000004"))
    by_megatron = train(tmp_path / "megatron", *SHORT, *from_sparse, ranks=1)
    for key in ("loss", "indexer_kl", "grad_norm", "update_norm"):
        assert by_megatron.series(key) == pytest.approx(whole.series(key)[4:], rel=1e-5), key
