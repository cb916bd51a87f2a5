"""Open data, model, optimizer, checkpoint and run folder of a run."""

from __future__ import annotations

import gc
from pathlib import Path

from gsa_train.arguments import Arguments
from gsa_train.checkpoint.damage import tensor_files
from gsa_train.checkpoint.finite import not_finite
from gsa_train.checkpoint.load import DamagedCheckpoint, load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import Config
from gsa_train.data.batches import shared_validation_sets
from gsa_train.data.tokenizer import companions_of, load_tokenizer
from gsa_train.distributed.parallel import Parallel, collective_timeout
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import PhaseRange, phase_ranges
from gsa_train.profiling.profiler import StepProfiler
from gsa_train.reliability.hang_limit import step_limit, watch_compilation
from gsa_train.reliability.hang_watchdog import HangWatchdog
from gsa_train.reliability.monitor.monitor import state_of
from gsa_train.reliability.stop_signals import LAUNCHER_GONE, StopRequest
from gsa_train.reliability.stop_vote import StopVote
from gsa_train.run.folder import open_run_folder
from gsa_train.run.state import Data, Run, Services, TrainState
from gsa_train.run_folder.initial_weights import (
    find_initial_weights,
    initial_data_state,
    load_initial_optimizer,
    load_initial_weights,
)
from gsa_train.run_folder.paths import run_dir
from gsa_train.run_folder.resume import ResumeError, Start, choose_again, open_batches
from gsa_train.run_folder.same_on_all import check_folder_is_shared
from gsa_train.validation.perplexity import describe
from gsa_train.validation.tasks import TaskClock, shared_tasks


def open_run(
    config: Config,
    arguments: Arguments,
    request: StopRequest,
    start: Start,
    parallel: Parallel,
    clock: RunClock,
) -> Run:
    """Open everything that training needs. Collective. The run folder is changed last, so that a refused start changes
    nothing there."""
    ranges, folder = phase_ranges(config.phases), run_dir(config)
    limit = step_limit(config.parallel)
    watchdog = HangWatchdog(parallel.rank, parallel.world_size, limit, folder / "faults", start.step)
    watchdog.on_orphaned = lambda: request.ask(LAUNCHER_GONE)
    if parallel.device.type == "cuda":
        watch_compilation(watchdog.compiling)
    profiler = StepProfiler(config.profile, folder / "profile", parallel.rank, parallel.device)
    clock.begin("readers")
    weights_from = None
    if start.checkpoint is None and config.checkpoint.initial_weights:
        weights_from = find_initial_weights(config)
    # A heartbeat follows each part. Reads have their own, longer time limits.
    tokenizer = load_tokenizer(config)
    watchdog.heartbeat(start.step, "starting")
    tasks = shared_tasks(config, tokenizer, parallel)
    watchdog.heartbeat(start.step, "starting")
    validation_sets = shared_validation_sets(config, tokenizer, parallel)
    watchdog.heartbeat(start.step, "starting")
    begins_at = initial_data_state(config, weights_from)
    batches = open_batches(config, arguments, start, tokenizer, parallel, begins_at)
    watchdog.heartbeat(start.step, "starting")
    clock.begin("model")
    model = build_model(config, parallel)
    if weights_from is not None:
        load_initial_weights(config, weights_from, model, tokenizer, parallel)
    while True:
        try:
            phase_optimizer = open_phase(
                config, model, start, ranges[start.phase_index], parallel, clock, weights_from
            )
            break
        except DamagedCheckpoint as damage:
            start = choose_again(start, str(damage), config, ranges, parallel)
            batches.close()
            batches = open_batches(config, arguments, start, tokenizer, parallel)

    clock.begin("folder")
    goodput = GoodputLog(clock)
    log, run_id, hang = open_run_folder(config, start, parallel, goodput)
    check_folder_is_shared(folder, run_id, parallel)
    watchdog.on_beat = goodput.beat
    if log.sinks is not None:
        watchdog.on_hang = log.sinks.tell_of_hang
        request.folder_is_gone = log.sinks.folder_was_gone
    services = Services(
        log=log,
        saver=CheckpointSaver(
            folder / "checkpoints",
            config.checkpoint,
            parallel,
            durable_step=start.step if start.same_run else None,
            small_files={tokenizer.file_name: tokenizer.file, **companions_of(config).files()},
        ),
        watchdog=watchdog,
        profiler=profiler,
        stop_vote=StopVote(request, collective_timeout(config.parallel)),
        goodput=goodput,
    )
    run = Run(
        config=config,
        parallel=parallel,
        model=model,
        data=Data(batches, validation_sets, tokenizer, tasks),
        services=services,
        start=start,
        state=state_at(start),
        run_id=run_id,
        phase_optimizer=phase_optimizer,
    )
    for each in validation_sets:
        log.message(describe(each))
    place = {"step": start.step, "phase": start.state.phase_name if start.state else ""}
    for name, fault in start.damaged:
        found = {"checkpoint_name": name, "checkpoint_error": fault}
        log.log({"event": "checkpoint_damaged", **place, **found})
    if hang is not None:
        log.log({"event": "restart_after_hang", **place, "reason": hang})
    return run


def state_at(start: Start) -> TrainState:
    """Returns the training state at a start."""
    saved = start.state
    if saved is None:
        return TrainState()
    clock, monitor = TaskClock(**saved.task_clock), state_of(saved.monitor)
    return TrainState(saved.step, saved.tokens, saved.validation_due, saved.tasks_due, clock, monitor)


def open_phase(
    config: Config,
    model: Model,
    start: Start,
    phase_range: PhaseRange,
    parallel: Parallel,
    clock: RunClock,
    weights_from: Path | None = None,
) -> PhaseOptimizer:
    """Build the optimizer of the first phase; load model and optimizer from the start's checkpoint. Collective.

    Args:
        weights_from: another run's checkpoint that the model's weights came from (`checkpoint.initial_weights`).

    Raises:
        StateError: the checkpoint's optimizer state does not match its weights.
        DamagedCheckpoint: a checksum is wrong or a value is not finite; call this again with another checkpoint.
        ResumeError: `weights_from` has values that are not finite.
    """
    # megatron-core collects all garbage at each save. Freezing excludes about a million permanent objects. The phase's
    # optimizer is built after the freeze, because it is freed with its phase.
    gc.collect()
    gc.freeze()
    phase_optimizer = build_optimizer(model, phase_range.phase, config)
    clock.begin("checkpoint")
    if start.checkpoint is not None:
        unchecked = tensor_files(start.checkpoint) if start.unchecked else None
        try:
            load_checkpoint(
                start.checkpoint, model, phase_optimizer, parallel, start.inside_phase, unchecked=unchecked
            )
            _check_finite(model, phase_optimizer, parallel)
        except DamagedCheckpoint:
            close_optimizer(model, phase_optimizer)
            gc.unfreeze()  # The caller calls this function again.
            raise
    if weights_from is not None:
        load_initial_optimizer(config, weights_from, model, phase_optimizer, parallel)
        try:
            _check_finite(model, phase_optimizer, parallel)
        except DamagedCheckpoint as damage:
            raise ResumeError(
                f"checkpoint.initial_weights = {config.checkpoint.initial_weights}: {weights_from} has {damage}. Give "
                "another checkpoint."
            ) from damage
    return phase_optimizer


def _check_finite(model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel) -> None:
    """Raise DamagedCheckpoint if a loaded value is not finite. Collective."""
    with phase_optimizer.whole_weights(changes=False):
        fault = not_finite(model, phase_optimizer, parallel)
    if fault is not None:
        raise DamagedCheckpoint(fault)
