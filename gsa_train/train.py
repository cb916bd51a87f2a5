"""A pretraining run from top to bottom:

config -> parallel groups -> where to start -> text -> model -> optimizer, checkpoint -> run folder
    -> for each phase: steps, its own optimizer -> summary

A spike may take it back to an earlier checkpoint, from which it goes on as a new start would.
"""

from __future__ import annotations

import gc
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from gsa_train.batches import load_tokenizer, shared_validation_sets
from gsa_train.checkpoint.initial_weights import load_initial_main_weights, load_initial_weights
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.cli import Arguments
from gsa_train.config import Config
from gsa_train.evaluate import describe
from gsa_train.metrics.wandb_sink import WandbRefused
from gsa_train.model.build import Model, build_model
from gsa_train.monitor.corruption import CorruptionFound
from gsa_train.monitor.monitor import MonitorStop, SpikeFound
from gsa_train.monitor.rewind import known_rewinds, rewind, skipped_steps, with_rewinds
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.main_weights import MainWeights, carry_over, keep_main_weights
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.parallel import Parallel, collective_timeout, init_parallel
from gsa_train.phases import PhaseSpan, phase_spans
from gsa_train.profiling.profiler import StepProfiler
from gsa_train.resume import Start, choose_start, open_batches, run_dir, start_from
from gsa_train.run.finish import finish, give_up, give_up_corrupted, leave, leave_world
from gsa_train.run.folder import open_run_folder
from gsa_train.run.lock import RunLock
from gsa_train.run.stop_signals import Stopped, StopRequest
from gsa_train.run.stop_vote import StopVote
from gsa_train.run.watch import Watch
from gsa_train.run.work_time import StragglerWarning
from gsa_train.trainer import Run, report_saves, run_phase, save_the_end


def train(config: Config, arguments: Arguments, request: StopRequest) -> None:
    """Train a checked config to the end, from the start or from where its run folder's checkpoint stands.

    Raises:
        Stopped: `request` asked for it on some rank; everything is saved, and the process group is left.
        MonitorStop: a spike ended the run; what is on disk is from before it, and the process group is left.
        CorruptionFound: a device or a weight is not what it should be; the process group is left.
    """
    parallel = init_parallel(config.parallel, config.run.seed)
    request.listen()  # before, there is nothing to save, and ranks may wait long for one that does not come
    spans = phase_spans(config.phases)
    lock = RunLock(run_dir(config), parallel)
    lock.take(make=False)  # a start that is refused makes no folder
    start = choose_start(config, arguments, spans, parallel)
    run = open_run(config, arguments, request, start, spans, lock, parallel)
    try:
        while (spike := train_phases(run, start, spans)) is not None:
            start = go_back(run, spike, arguments, spans)
        run.batches.close()
        finish(run, spans[-1].phase)
    except Stopped as stop:
        leave(run, stop)
        raise
    except MonitorStop as stop:
        give_up(run, stop, next(span.phase for span in spans if run.step <= span.end))
        raise
    except CorruptionFound as fault:
        give_up_corrupted(run, fault)
        raise
    finally:
        run.saver.close()  # whatever stops the training, the save under way is finished
        run.profiler.close()
    lock.close()
    run.stop_vote.close()
    leave_world(run.watch)


def open_run(
    config: Config,
    arguments: Arguments,
    request: StopRequest,
    start: Start,
    spans: list[PhaseSpan],
    lock: RunLock,
    parallel: Parallel,
) -> Run:
    """All that training needs, as it was at the start: text, model, optimizer of the first phase, and then the run
    folder, which nothing changes before all that may refuse the start is done. Collective."""
    watch = Watch(
        parallel.rank,
        parallel.world_size,
        timedelta(minutes=config.parallel.timeout_minutes),
        run_dir(config) / "faults",
        start.step,
    )
    profiler = StepProfiler(config.profile, run_dir(config) / "profile", parallel.rank, parallel.device)
    # Noted one by one for the watch: each may take as long as reads have limits of their own.
    tokenizer = load_tokenizer(config)
    watch.note(start.step, "starting")
    validation_sets = shared_validation_sets(config, tokenizer, parallel)
    watch.note(start.step, "starting")
    batches = open_batches(config, arguments, start, tokenizer, parallel)
    watch.note(start.step, "starting")
    model = build_model(config, parallel)
    weights_from = None
    if start.checkpoint is None and config.checkpoint.initial_weights:
        weights_from = load_initial_weights(config, model, tokenizer, parallel)
    phase_optimizer = open_phase(config, model, start, spans, parallel, weights_from)

    lock.take(make=True)
    try:
        folder = open_run_folder(config, start, parallel, total_steps=spans[-1].end)
    except WandbRefused:
        lock.take_back()
        raise
    if folder.sinks is not None:
        watch.on_hang = folder.sinks.tell_of_hang
    rewinds = known_rewinds(folder.checkpoints, start, parallel)
    run = Run(
        config=config,
        parallel=parallel,
        model=model,
        batches=batches,
        validation_sets=validation_sets,
        tokenizer=tokenizer,
        saver=CheckpointSaver(
            folder.checkpoints,
            config.checkpoint,
            parallel,
            durable_step=start.step if start.same_run else None,
            reach_steps=config.monitor.reach_steps,
        ),
        sinks=folder.sinks,
        progress=folder.progress,
        wandb_run_id=folder.wandb_run_id,
        watch=watch,
        profiler=profiler,
        straggler_warning=StragglerWarning(config.logging.straggler_ratio),
        stop_vote=StopVote(request, collective_timeout(config.parallel)),
        phase_optimizer=phase_optimizer,
        step=start.step,
        tokens=start.tokens,
        validation_due=start.state is not None and start.state.validation_due,
        monitor=with_rewinds(start.monitor, rewinds),
        skipped_steps=skipped_steps(config, rewinds),
        records_late=parallel.device.type == "cuda",
    )
    for each in validation_sets:
        run.message(describe(each))
    report_damaged(run, start)
    if folder.hang is not None:
        phase = start.state.phase_name if start.state else ""
        run.log({"event": "restart_after_hang", "step": start.step, "phase": phase, "reason": folder.hang})
    return run


def open_phase(
    config: Config,
    model: Model,
    start: Start,
    spans: list[PhaseSpan],
    parallel: Parallel,
    weights_from: Path | None = None,
) -> PhaseOptimizer:
    """Optimizer of the phase to enter first, model and optimizer as the start's checkpoint has them. Collective.

    Args:
        weights_from: another run's checkpoint, whose weights the model has (`checkpoint.initial_weights`).

    Raises:
        StateError: the checkpoint's optimizer state is not that of its weights.
    """
    # All that is here stays: without it in the way, a full collection, of which megatron-core makes one per save, takes
    # 10 ms instead of 300. The optimizer goes with its phase.
    gc.collect()
    gc.freeze()
    phase_optimizer = build_optimizer(model, spans[start.phase_index].phase, config)
    if start.checkpoint is not None:
        load_checkpoint(start.checkpoint, model, phase_optimizer, parallel, with_optimizer=start.inside_phase)
    if weights_from is not None:
        load_initial_main_weights(weights_from, model, phase_optimizer, parallel)
    return phase_optimizer


def train_phases(run: Run, start: Start, spans: list[PhaseSpan]) -> SpikeFound | None:
    """From the start, whose phase is open, to the last checkpoint, or to a spike that asks for a rewind."""
    if start.state is not None:
        start.restore_rng(run.parallel)
    kept: MainWeights | None = None
    for span in spans[start.phase_index :]:
        if kept is not None:
            # Each phase trains other parameters, so each has its own gradient buffers and optimizer.
            run.phase_optimizer = build_optimizer(run.model, span.phase, run.config)
            carry_over(kept, run.phase_optimizer)
            kept = None  # or they would take their memory as long as the phase
        assert run.phase_optimizer is not None
        try:
            spike = run_phase(run, span, run.phase_optimizer)
        finally:
            run.write_late()  # of the last step, or of one before a step that failed
        if spike is None and span is spans[-1]:
            save_the_end(run, span, run.phase_optimizer)
        elif spike is None:
            kept = keep_main_weights(run.model, run.phase_optimizer)
        close_optimizer(run.model, run.phase_optimizer)
        # In fp32 its shards are views of the weights, which keep autograd's nodes alive and, with them, the hooks
        # of this phase's gradient buffers: it must be gone before the next phase hangs up its own.
        run.phase_optimizer = None
        gc.collect()
        if spike is not None:
            return spike
    return None


def go_back(run: Run, spike: SpikeFound, arguments: Arguments, spans: list[PhaseSpan]) -> Start:
    """Make `run` what it would be if it were started from the checkpoint before the spike. Collective.

    Raises:
        MonitorStop: there is nothing to go back to, or the run has gone back too often.
        CheckpointError: too many saves in a row have failed.
    """
    gc.unfreeze()  # until `open_phase`
    report_saves(run, run.saver.ended(now=run.step, wait=True))
    run.watch.note(run.step, "starting")
    run.profiler.close()
    rewinds = run.monitor.rewinds
    checkpoint, done, damaged = rewind(
        spike, run.saver.checkpoints, rewinds, run.config, run.parallel, spans[-1].end
    )
    start = start_from(checkpoint, run.config, spans, damaged)
    # Before what takes long: a run that is killed in it starts from this checkpoint, and drops what was logged after.
    if run.sinks is not None and run.progress is not None:
        run.sinks.go_back(start.step)
        run.progress.go_back(start.step)
    facts = {"signal": spike.signal, "value": spike.value, "threshold": spike.threshold, "action": "rewind"}
    phase = spans[start.phase_index].phase.name
    run.log({"event": "rewind", "step": start.step, "phase": phase, **asdict(done), **facts})
    report_damaged(run, start)
    run.saver.go_back(start.step)
    run.batches.close()
    run.batches = open_batches(run.config, arguments, start, run.tokenizer, run.parallel)
    run.step, run.tokens, run.validated, run.skips_told = start.step, start.tokens, None, 0
    run.monitor = with_rewinds(start.monitor, [*rewinds, asdict(done)])
    run.skipped_steps = skipped_steps(run.config, run.monitor.rewinds)
    run.model.runtime.stats.reset()
    run.phase_optimizer = open_phase(run.config, run.model, start, spans, run.parallel)
    return start


def report_damaged(run: Run, start: Start) -> None:
    """Into the metrics, what the resume passed over; the log has it already."""
    for name, fault in start.damaged:
        phase = start.state.phase_name if start.state else ""
        record = {"event": "checkpoint_damaged", "step": start.step, "phase": phase}
        run.log({**record, "checkpoint_name": name, "checkpoint_error": fault})
