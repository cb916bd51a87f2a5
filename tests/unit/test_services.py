"""Tests that a class and a row of `services_of` make a service, which the loop tells of every step."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.services import Service, StepPlan
from gsa_train.trainer import run_phase
from helpers.single_rank import SPARSE, tiny_config, tiny_model
from helpers.tiny_run import tiny_run


@dataclass
class StepCount(Service):
    trained: int = 0
    left_out: list[int] = field(default_factory=list)

    def on_batch(self, *_: Any) -> None:
        self.trained += 1

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        record["trained_steps"] = self.trained

    def after_step(self, plan: StepPlan) -> None:
        self.left_out += [] if plan.trains else [plan.step]


def test_a_service_that_counts_steps():
    phase = dataclasses.replace(SPARSE, steps=4)
    config = tiny_config([phase], logging={"every_steps": 2})
    model, count, records = tiny_model(config, variance_ema=0.02), StepCount(), []
    sinks, skipped = Mock(log=records.append), frozenset([3])
    run = tiny_run(config, model, sinks=sinks, skipped_steps=skipped)
    run.listening.append(count)
    optimizer = build_optimizer(model, phase, config)
    run_phase(run, phase_ranges(config.phases)[0], optimizer)
    close_optimizer(model, optimizer)
    assert (count.trained, count.left_out) == (3, [3])
    logged = [(each["step"], each["trained_steps"]) for each in records if "event" not in each]
    assert logged == [(1, 1), (2, 2), (4, 3)]
