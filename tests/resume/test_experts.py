"""Tests runs of mixtures of experts over ranks: kills, checks for wrong bits, and separate experts."""

from pathlib import Path

import pytest

from gsa_train.metrics.record_format import read_records
from gsa_train.process.exit_codes import CORRUPTED
from helpers.runs import LONGEST_WAIT_SECONDS, QUICK, QUICK_STEPS, finished, kill, numbers_of, start

pytestmark = pytest.mark.slow

EXPERTS = (*QUICK, "checkpoint.every_steps=4", "moe.experts=4", "moe.expert_ffn_hidden_size=32")
TWO_RANKS = (*EXPERTS, "parallel.expert=2", "moe.router_score=sigmoid", "moe.balancing=aux_free")


def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """The kill comes in sparse training, after routers have changed. Checks for wrong bits change no number."""
    checks = ("monitor.recheck_every_steps=3", "monitor.compare_replicas_every_steps=3")
    undisturbed = finished(*TWO_RANKS, ranks=2)
    run = start(tmp_path, *TWO_RANKS, *checks, ranks=2, faults={"held": [[10, 1]]})
    run.wait_until(lambda: 9 in run.steps_printed() and run.latest == "step_00000008")
    kill(run)
    again = start(tmp_path, *TWO_RANKS, *checks, ranks=2)
    again.wait()
    assert again.steps_printed()[0] == 9
    assert again.series("step") == list(range(1, QUICK_STEPS + 1))
    assert numbers_of(again.records()) == numbers_of(undisturbed.records())


def test_a_flipped_bit_of_an_expert_is_found_among_its_replicas(tmp_path: Path) -> None:
    """Ranks 0 and 2 have the same experts, and ranks 1 and 3 have the same experts."""
    checks = ("monitor.compare_replicas_every_steps=4", "parallel.distributed_optimizer=false")
    layout = (*EXPERTS, "parallel.expert=2", "train.micro_batch_size=1", *checks)
    run = start(tmp_path, *layout, ranks=4, faults={"flipped_bit": [8, 3, 2]})
    assert run.process.wait(LONGEST_WAIT_SECONDS) == CORRUPTED
    (event,) = (
        record for record in read_records(run.folder / "metrics.jsonl") if record.get("event") == "corruption"
    )
    assert (event["step"], event["ranks"], event["corruption"]) == (8, [0, 2], "weights")


@pytest.mark.nightly
def test_experts_one_by_one_resume_a_run_of_grouped_ones(tmp_path: Path) -> None:
    """The computation may change, but the checkpoint is the same."""
    grouped = finished(*TWO_RANKS, ranks=2)
    checkpoint = grouped.checkpoints / "step_00000008"
    options = ("moe.experts_impl=sequential", "--resume-from", str(checkpoint))
    run = start(tmp_path, *TWO_RANKS, *options, ranks=2)
    run.wait()
    step_9 = run.steps()[0]
    assert step_9["step"] == 9
    assert step_9["loss"] == pytest.approx(grouped.steps()[8]["loss"], rel=1e-5)
