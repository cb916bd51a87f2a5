"""A pretraining run from top to bottom:

config -> parallel groups -> model -> checkpoint -> text -> for each phase: optimizer, steps -> summary

A spike may take it back to an earlier checkpoint, from which it goes on as a new start would.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace

import torch.distributed as dist

from gsa_train.batches import load_tokenizer, read_validation_sets
from gsa_train.checkpoint import load_checkpoint
from gsa_train.cli import Arguments
from gsa_train.config import Config
from gsa_train.evaluate import describe
from gsa_train.finish import finish
from gsa_train.model.build import build_model
from gsa_train.monitor import EXIT_CODE, MonitorStop, SpikeFound
from gsa_train.optim import build_optimizer, close_optimizer
from gsa_train.parallel import init_parallel, shutdown_parallel
from gsa_train.phases import PhaseSpan, phase_spans
from gsa_train.resume import Start, choose_start, open_batches, start_from
from gsa_train.rewind import known_rewinds, rewind, skipped_steps
from gsa_train.run_folder import open_run_folder
from gsa_train.trainer import Run, run_phase, save


def train(config: Config, arguments: Arguments) -> None:
    """Train a checked config to the end, from the start or from where its run folder's checkpoint stands.

    Raises:
        MonitorStop: a spike ended the run; what is on disk is from before it.
    """
    parallel = init_parallel(config.parallel, config.run.seed)
    spans = phase_spans(config.phases)
    start = choose_start(config, arguments, spans, parallel)
    tokenizer = load_tokenizer(config)
    validation_sets = read_validation_sets(config, tokenizer)
    batches = open_batches(config, arguments, start, tokenizer, parallel)
    folder = open_run_folder(config, start, parallel, total_steps=spans[-1].end)
    model = build_model(config, parallel)
    rewinds = known_rewinds(folder.checkpoints, start, parallel)

    run = Run(
        config=config,
        parallel=parallel,
        model=model,
        batches=batches,
        validation_sets=validation_sets,
        tokenizer=tokenizer,
        checkpoints=folder.checkpoints,
        sinks=folder.sinks,
        progress=folder.progress,
        wandb_run_id=folder.wandb_run_id,
        step=start.step,
        tokens=start.tokens,
        saved_step=start.step if start.same_run else None,
        monitor=replace(start.monitor, rewinds=rewinds),
        skipped_steps=skipped_steps(config, rewinds),
    )
    if run.progress is not None:
        for each in validation_sets:
            run.progress.message(describe(each))
    try:
        while (found := _train_phases(run, spans, start)) is not None:
            start = _go_back(run, found, arguments, spans)
    except MonitorStop as stop:
        phase = next(span.phase.name for span in spans if run.step <= span.end)
        run.log({"event": "stop", "step": run.step, "phase": phase, "reason": str(stop)})
        run.batches.close()
        if run.sinks is not None:
            run.sinks.close(exit_code=EXIT_CODE)
        dist.barrier()  # the launcher ends all ranks as soon as one has ended
        shutdown_parallel()
        raise
    run.batches.close()
    finish(run, spans[-1].phase)
    shutdown_parallel()


def _train_phases(run: Run, spans: list[PhaseSpan], start: Start) -> SpikeFound | None:
    """From `start` to the end, or to a spike that asks for a rewind."""
    for span in spans[start.phase_index :]:
        # Each phase trains other parameters, so each has its own gradient buffers and optimizer.
        phase_optimizer = build_optimizer(run.model, span.phase, run.config)
        if start.checkpoint is not None and span.index == start.phase_index:
            load_checkpoint(
                start.checkpoint, run.model, phase_optimizer, run.parallel, with_optimizer=start.inside_phase
            )
            start.restore_rng(run.parallel)
        found = run_phase(run, span, phase_optimizer)
        if found is None and span is spans[-1]:
            save(run, span, phase_optimizer)
        close_optimizer(run.model, phase_optimizer)
        # In fp32 its shards are views of the weights, which keep autograd's nodes alive and, with them, the hooks
        # of this phase's gradient buffers: it must be gone before the next phase hangs up its own.
        del phase_optimizer
        gc.collect()
        if found is not None:
            return found
    return None


def _go_back(run: Run, found: SpikeFound, arguments: Arguments, spans: list[PhaseSpan]) -> Start:
    """Make `run` what it would be if it were started from the checkpoint before the spike."""
    rewinds = run.monitor.rewinds
    checkpoint, done = rewind(found, run.checkpoints, rewinds, run.config, run.parallel, spans[-1].end)
    start = start_from(checkpoint, run.config, spans)
    run.batches.close()
    run.batches = open_batches(run.config, arguments, start, run.tokenizer, run.parallel)
    run.step, run.tokens, run.saved_step, run.validated = start.step, start.tokens, start.step, None
    run.monitor = replace(start.monitor, rewinds=[*rewinds, asdict(done)])
    run.skipped_steps = skipped_steps(run.config, run.monitor.rewinds)
    run.model.runtime.stats.reset()
    if run.sinks is not None and run.progress is not None:
        run.sinks.go_back(start.step)
        run.progress.go_back(start.step)
    spike = {"signal": found.signal, "value": found.value, "threshold": found.threshold, "action": "rewind"}
    phase = spans[start.phase_index].phase.name
    run.log({"event": "rewind", "step": start.step, "phase": phase, **asdict(done), **spike})
    return start
