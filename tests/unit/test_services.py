"""A service is one class and one row in `services_of`: the loop tells it of every step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

from gsa_train.config import PhaseConfig
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.services import Service, StepPlan
from gsa_train.trainer import run_phase
from helpers.single_rank import SPARSE, random_batches, tiny_config, tiny_model
from helpers.tiny_run import tiny_run


@dataclass
class StepCount(Service):
    """Trained and left-out steps; logged steps get the first number."""

    trained: int = 0
    left_out: int = 0
    told: list[str] = field(default_factory=list)

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        self.told.append(f"{phase.name} after step {start}")

    def on_batch(self, *_: Any) -> None:
        self.trained += 1

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        record["trained_steps"] = self.trained

    def after_step(self, plan: StepPlan) -> None:
        self.left_out += not plan.trains

    def on_save(self, step: int) -> None:
        self.told.append(f"save of step {step}")

    def end_phase(self, step: int) -> None:
        self.told.append(f"end at step {step}")


def test_a_service_that_counts_steps() -> None:
    phase = dataclasses.replace(SPARSE, steps=4)
    config = tiny_config([phase], logging={"every_steps": 2})
    model, count, records = tiny_model(config, variance_ema=0.02), StepCount(), []
    batches = Mock(
        next_step=lambda: random_batches(config), wait_seconds=0.0, counters={}, checksum=lambda: 0
    )
    saver = Mock(is_due=lambda step: step == 2, has=lambda step: False, durable_step=None)
    saver.configure_mock(ended=lambda now: [], begin=lambda *_: [], take_held_seconds=lambda: 0.0)
    skipped = frozenset([3])
    run = tiny_run(
        config, model, batches=batches, saver=saver, sinks=Mock(log=records.append), skipped_steps=skipped
    )
    run.listening.append(count)
    optimizer = build_optimizer(model, phase, config)
    run_phase(run, phase_ranges(config.phases)[0], optimizer)
    close_optimizer(model, optimizer)
    assert (count.trained, count.left_out) == (3, 1)
    assert count.told == ["sparse after step 0", "save of step 2", "end at step 4"]
    logged = [(each["step"], each["trained_steps"]) for each in records if "event" not in each]
    assert logged == [(1, 1), (2, 2), (4, 3)]
