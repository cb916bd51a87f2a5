"""Back to the checkpoint before a spike: the run as it would be if it were started from there."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import asdict
from typing import Any

from gsa_train.arguments import Arguments
from gsa_train.checkpoint.load import DamagedCheckpoint
from gsa_train.phases import PhaseRange
from gsa_train.reliability.monitor.monitor import SpikeFound
from gsa_train.run.open import open_phase, report_damaged, state_at
from gsa_train.run.saves import report_saves
from gsa_train.run.state import Run
from gsa_train.run_folder.resume import open_batches, start_from
from gsa_train.run_folder.rewind import rewind, skipped_steps


def go_back(run: Run, spike: SpikeFound, arguments: Arguments, ranges: list[PhaseRange]) -> None:
    """Make `run` what it would be if it were started from the checkpoint before the spike. Collective.

    Raises:
        MonitorStop: there is nothing to go back to, or the run has gone back too often.
        CheckpointError: too many saves in a row have failed.
    """
    services, step = run.services, run.state.step
    gc.unfreeze()  # until `open_phase`
    services.watchdog.heartbeat(step, "starting")
    services.goodput.note(step, next(each.phase.name for each in ranges if step <= each.end))
    services.goodput.clock.begin("checkpoint")
    report_saves(run, services.saver.ended(now=step, wait=True))
    services.watchdog.heartbeat(step, "starting")
    services.profiler.on_stop()
    rewinds = run.state.monitor.rewinds
    damaged: list[tuple[str, str]] = []
    while True:
        try:
            _start_before(run, spike, rewinds, damaged, arguments, ranges)
            return
        except DamagedCheckpoint as damage:
            assert run.start.checkpoint is not None
            damaged = [*run.start.damaged, (run.start.checkpoint.name, str(damage))]


def _start_before(
    run: Run,
    spike: SpikeFound,
    rewinds: list[dict[str, Any]],
    known: list[tuple[str, str]],
    arguments: Arguments,
    ranges: list[PhaseRange],
) -> None:
    """From the newest checkpoint that is old enough.

    Args:
        rewinds: those before.
        known: checkpoints that are not to be taken: name, and what is wrong with it.

    Raises:
        DamagedCheckpoint: it has values that are not finite; call this again without it.
    """
    config, parallel, services, last_step = run.config, run.parallel, run.services, ranges[-1].end
    checkpoint, done, damaged = rewind(
        spike, services.saver.checkpoints, rewinds, config, parallel, last_step, known
    )
    start = run.start = start_from(checkpoint, config, ranges, damaged)
    phase_range = ranges[start.phase_index]
    # Before what takes long: a run that is killed in it starts from this checkpoint, and drops what was logged after.
    services.log.go_back(start.step)
    services.goodput.go_back(start.step)
    facts = {"signal": spike.signal, "value": spike.value, "threshold": spike.threshold, "action": "rewind"}
    event = {"event": "rewind", "step": start.step, "phase": phase_range.phase.name}
    services.log.log({**event, **asdict(done), **facts})
    report_damaged(run)
    services.saver.go_back(start.step)
    run.data.batches.close()
    run.data.batches = open_batches(config, arguments, start, run.data.tokenizer, parallel)
    # Validation and tasks at this step are in the metrics already.
    clock = run.state.task_clock  # what was spent stays spent
    state = state_at(start, [*rewinds, asdict(done)])
    run.state = dataclasses.replace(state, validation_due=False, tasks_due=False, task_clock=clock)
    run.newest_validation = run.newest_tasks_step = None
    run.skipped_steps = skipped_steps(config, run.state.monitor.rewinds)
    run.model.runtime.stats.reset()
    run.phase_optimizer = open_phase(config, run.model, start, phase_range, parallel, services.goodput.clock)
