"""Start checkpoints of a run, wait for the last one, and report how each ended."""

from __future__ import annotations

import time
from dataclasses import asdict

from gsa_train.checkpoint.load import RunState, local_rng
from gsa_train.checkpoint.save import SaveResult
from gsa_train.config import config_to_yaml
from gsa_train.distributed.objects import gathered
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.phases import PhaseRange
from gsa_train.reliability.monitor.monitor import NotFinite
from gsa_train.run.state import Run

LONGEST_WAIT_SHARE = 0.25
"""Longest wait between two tries of the last save, as a share of the watchdog's `parallel.timeout_minutes`."""


def save(run: Run, phase_range: PhaseRange, phase_optimizer: PhaseOptimizer) -> None:
    """Start to save the current state, unless a checkpoint of this step exists. Collective.

    Raises:
        CheckpointError: too many consecutive saves have failed.
        NotFinite: weights or optimizer state are not finite.
    """
    state, saver = run.state, run.services.saver
    if saver.has(state.step):
        return
    for service in run.listening:
        service.on_save(state.step)
    with run.services.goodput.clock.during("save"):
        content = RunState(
            step=state.step,
            tokens=state.tokens,
            phase_index=phase_range.index,
            phase_name=phase_range.phase.name,
            phase_start=phase_range.start,
            data=run.data.batches.state(),
            wandb_run_id=run.services.log.wandb_run_id,
            config_yaml=config_to_yaml(run.config),
            layout=run.parallel.layout,
            rng=gathered(local_rng()),
            validation_due=state.validation_due,
            tasks_due=state.tasks_due,
            task_clock=asdict(state.task_clock.of_main_rank(run.parallel.device)),
            monitor=asdict(state.monitor),
            run=run.config.run.name,
            run_id=run.run_id,
        )
        report_saves(run, saver.begin(content, run.model, phase_optimizer))


def save_the_end(run: Run, phase_range: PhaseRange, phase_optimizer: PhaseOptimizer) -> None:
    """Write the last checkpoint of the run and wait until it is durable. Collective.

    A failed save is repeated after a wait, which doubles each time up to LONGEST_WAIT_SHARE.

    Raises:
        CheckpointError: too many consecutive saves have failed.
        NotFinite: weights or optimizer state are not finite.
    """
    step, saver = run.state.step, run.services.saver
    for service in run.listening:
        service.on_save(step)
    longest_wait_seconds = LONGEST_WAIT_SHARE * 60 * run.config.parallel.timeout_minutes
    with run.services.goodput.clock.during("save"):
        save(run, phase_range, phase_optimizer)
        report_saves(run, saver.ended(now=step, wait=True))
        while not saver.has(step):
            time.sleep(min(2.0 ** (saver.failures - 1), longest_wait_seconds))
            save(run, phase_range, phase_optimizer)
            report_saves(run, saver.ended(now=step, wait=True))


def newest_save(run: Run) -> int | None:
    """Wait for the current save and report it. Returns the step of the newest checkpoint."""
    run.services.watchdog.heartbeat(run.state.step, "saving")
    for result in run.services.saver.ended(now=run.state.step, wait=True):
        log_save(run, result)
    return run.services.saver.durable_step


def report_saves(run: Run, results: list[SaveResult]) -> None:
    """Log the results of saves.

    Raises:
        CheckpointError: too many consecutive saves have failed.
        NotFinite: the checkpoint was refused because weights or optimizer state are not finite.
    """
    for result in results:
        log_save(run, result)
        if result.not_finite:
            raise NotFinite(
                f"step {result.step}: weights or optimizer state have {result.error}. Nothing was saved after step "
                f"{run.services.saver.durable_step or 0}; add --resume-after-stop to go on from there, and if it comes "
                "again, look for it with monitor.recheck_every_steps=1",
                result.step,
            )
    run.services.saver.check()


def log_save(run: Run, result: SaveResult) -> None:
    log, saver = run.services.log, run.services.saver
    record = {
        "event": "checkpoint" if result.error is None else "checkpoint_failed",
        "step": result.step,
        "phase": result.phase,
        "checkpoint_stall_seconds": result.stall_seconds,
        "checkpoint_save_seconds": result.save_seconds,
    }
    if result.error is None:
        log.log({**record, "checkpoint_bytes": result.bytes})
        log.message(
            f"saved {result.folder} ({result.bytes / 1e9:.3g} GB, durable after {result.save_seconds:.2f} s; training "
            f"waited {result.stall_seconds:.2f} s)"
        )
    else:
        log.log({**record, "checkpoint_error": result.error, "checkpoint_failures": saver.failures})
        follows = "" if result.not_finite else f"; {saver.next_try()}"
        log.message(f"step {result.step} could not be saved: {result.error}{follows}")
    for warning in result.warnings:
        log.message(f"checkpoint: {warning}")
