"""Logs what a run logs, and reads it back."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from gsa_train.config import LoggingConfig
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import open_sinks

JSONL_ONLY = LoggingConfig(tensorboard=False, wandb="disabled")


@pytest.fixture(autouse=True)
def numbers_of_event_files(monkeypatch):
    """Restart the numbers in each test: TensorBoard sorts files of the same second by name, 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def open_run(run_dir, resume_step=None, logging=JSONL_ONLY, **how):
    return open_sinks(logging, run_dir, [], resume_step, wandb=None, **how)


def step_record(step, **values):
    return {"step": step, "phase": "sparse", "loss": 1.0 / step, "recall": None, **values}


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def read_strictly(path):
    *lines, rest = path.read_text().split("\n")
    assert rest == ""
    return [json.loads(line, parse_constant=refuse_constant) for line in lines]


def tensorboard_of(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def steps_of(run_dir):
    return [record["step"] for record in read_records(run_dir / "metrics.jsonl")]
