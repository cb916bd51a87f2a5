"""Tests repeated steps and replica comparison on two CUDA devices: clean runs do not change, and wrong bits show."""

from pathlib import Path

from gsa_train.metrics.record_format import read_records
from helpers.runs import LONGEST_WAIT_SECONDS, OF_A_GPU, SMALL, numbers_of, start
from helpers.tiers import needs_devices

pytestmark = needs_devices(2)
CHECKS = ("monitor.recheck_every_steps=3", "monitor.compare_replicas_every_steps=3")
COPIES = ("parallel.distributed_optimizer=false", "train.precision=fp32")
"""Each replica updates its weights itself and has no other copy, so that a wrong weight stays wrong."""


def test_a_clean_run_has_its_own_numbers(tmp_path: Path) -> None:
    plain, checked = (
        start(tmp_path / name, *SMALL, *checks, ranks=2, real=True).wait()
        for name, checks in (("plain", ()), ("checked", CHECKS))
    )
    assert [record for record in checked.records() if record.get("event") == "corruption"] == []
    assert numbers_of(checked.records(), keys=OF_A_GPU) == numbers_of(plain.records(), keys=OF_A_GPU)


def test_a_flipped_bit_is_found_among_replicas(tmp_path: Path) -> None:
    run = start(tmp_path, *SMALL, *CHECKS, *COPIES, ranks=2, real=True, faults={"flipped_bit": [5, 3, 1]})
    assert run.process is not None
    assert run.process.wait(LONGEST_WAIT_SECONDS) != 0
    records = read_records(run.folder / "metrics.jsonl")
    (event,) = (record for record in records if record.get("event") == "corruption")
    # The check runs before the save of that step.
    assert (event["step"], event["ranks"], event["corruption"]) == (5, [0, 1], "weights")
