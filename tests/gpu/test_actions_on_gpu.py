"""Tests stops and wrong bits on CUDA devices, where a step's record is written after the next step's launch."""

import signal
from pathlib import Path

from gsa_train.metrics.record_format import read_records
from helpers.runs import LONGEST_WAIT_SECONDS, OF_A_GPU, SMALL, Run, numbers_of, start
from helpers.tiers import needs_devices

OPTIONS = (
    *(*SMALL, "train.micro_batch_size=4", "checkpoint.every_steps=40", "logging.every_steps=5"),
    *("phases.0.steps=4", "phases.0.warmup_steps=3"),
    *("phases.1.steps=60", "phases.1.lr=2e-3", "phases.1.min_lr=2e-3"),
    *("monitor.window_steps=40", "monitor.min_history_steps=24", "monitor.grad_norm_min_ratio=5"),
)


def assert_same_numbers(one: Run, other: Run, after: int, *without: str) -> None:
    """Compare every record after a step, without times, memory and the named keys."""
    found, expected = (
        numbers_of((record for record in run.records() if record["step"] > after), keys=(*OF_A_GPU, *without))
        for run in (one, other)
    )
    assert found == expected


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = start(tmp_path, *OPTIONS, name="whole", real=True)
    stopped = start(tmp_path, *OPTIONS, name="stopped", launcher="python", real=True)
    stopped.wait_until(lambda: len(stopped.steps()) >= 4)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.wait(expected=75)
    last = int(stopped.latest.removeprefix("step_"))
    assert 10 <= last < 64
    assert stopped.steps()[-1]["step"] <= last
    again = start(tmp_path, *OPTIONS, name="stopped", real=True).wait()
    assert again.steps_printed()[0] > last
    assert_same_numbers(again, whole.wait(), 0)


CHECKS = ("monitor.recheck_every_steps=3", "monitor.compare_replicas_every_steps=3")
COPIES = ("parallel.distributed_optimizer=false", "train.precision=fp32")
"""Each replica updates its weights itself and has no other copy, so that a wrong weight stays wrong."""


@needs_devices(2)
def test_a_clean_run_has_its_own_numbers(tmp_path: Path) -> None:
    plain, checked = (
        start(tmp_path / name, *SMALL, *checks, ranks=2, real=True).wait()
        for name, checks in (("plain", ()), ("checked", CHECKS))
    )
    assert [record for record in checked.records() if record.get("event") == "corruption"] == []
    assert numbers_of(checked.records(), keys=OF_A_GPU) == numbers_of(plain.records(), keys=OF_A_GPU)


@needs_devices(2)
def test_a_flipped_bit_is_found_among_replicas(tmp_path: Path) -> None:
    run = start(tmp_path, *SMALL, *CHECKS, *COPIES, ranks=2, real=True, faults={"flipped_bit": [5, 3, 1]})
    assert run.process.wait(LONGEST_WAIT_SECONDS) != 0
    records = read_records(run.folder / "metrics.jsonl")
    (event,) = (record for record in records if record.get("event") == "corruption")
    # The check runs before the save of that step.
    assert (event["step"], event["ranks"], event["corruption"]) == (5, [0, 1], "weights")
