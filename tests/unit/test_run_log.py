"""Every record has the time of its making, whichever way it goes, and after a resume, too."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gsa_train.config import LoggingConfig
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import open_sinks
from gsa_train.run import run_log
from gsa_train.run.run_log import RunLog

LOGGING = LoggingConfig(tensorboard=False, wandb="disabled")


@pytest.mark.parametrize("writes_late", [False, True])
def test_every_record_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_late: bool
) -> None:
    clock = iter([1000.5, 1001.25, 1002.125])
    monkeypatch.setattr(run_log, "time", Mock(time=lambda: next(clock)))
    for resume_step, steps in ((None, [1]), (1, [2])):
        sinks = open_sinks(LOGGING, tmp_path, ["sparse"], resume_step, wandb=None)
        log = RunLog(sinks, Mock(), None, writes_late=writes_late)
        for step in steps:
            log.log_step({"step": step, "phase": "sparse", "loss": 1.0})
        log.write_late()
        log.close(0)
    sinks = open_sinks(LOGGING, tmp_path, ["sparse"], 2, wandb=None)
    RunLog(sinks, Mock(), None).log({"event": "validation", "step": 2, "phase": "sparse"})
    sinks.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(each["step"], each["time"]) for each in records] == [(1, 1000.5), (2, 1001.25), (2, 1002.125)]
