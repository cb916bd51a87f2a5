"""Tests that every record has the time of its creation, by any path, also after a resume."""

from pathlib import Path
from unittest.mock import Mock

from gsa_train.config import LoggingConfig
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import open_sinks
from gsa_train.run.run_log import RunLog

LOGGING = LoggingConfig(tensorboard=False, wandb="disabled")


def test_a_late_record_comes_before_the_next_one_and_at_the_latest_at_the_end(tmp_path: Path) -> None:
    log = RunLog(open_sinks(LOGGING, tmp_path, ["sparse"], None, wandb=None), Mock(), None, writes_late=True)

    def log_late(step: int) -> None:
        def make_and_log() -> None:
            log.log({"step": step, "phase": "sparse", "loss": 1.0})
            log.log({"event": "warning", "step": step, "phase": "sparse"})  # of the record

        log.log_late(make_and_log)

    def logged(file: str = "metrics.jsonl") -> list[tuple[int, str | None]]:
        return [(each["step"], each.get("event")) for each in read_records(tmp_path / file)]

    log_late(1)
    assert logged() == []
    log.write_late()
    log.write_late()
    expected: list[tuple[int, str | None]] = [(1, None), (1, "warning")]
    assert logged() == expected
    log_late(2)
    log.log({"event": "spike", "step": 2, "phase": "sparse"})
    expected += [(2, None), (2, "warning"), (2, "spike")]
    assert logged() == expected
    log_late(3)
    log.go_back(2)
    assert logged() == expected
    assert logged("metrics_rewound.jsonl") == [(3, None), (3, "warning")]
    log_late(4)
    log.log_samples({"step": 4, "phase": "sparse", "samples": []})
    expected += [(4, None), (4, "warning")]
    assert logged() == expected
    log_late(5)
    log.close(0)
    assert logged() == [*expected, (5, None), (5, "warning")]
