"""The loop over one phase: step, log, validate, save; and what the monitor says to a spike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NoReturn

from gsa_data.tokenize import Tokenizer
from gsa_data.validation import ValidationSet
from gsa_train.batches import TrainBatches
from gsa_train.checkpoint.load import RunState, gather_rng
from gsa_train.checkpoint.save import CheckpointSaver, SaveResult
from gsa_train.config import Config, config_to_yaml
from gsa_train.evaluate import evaluate
from gsa_train.metrics.progress import Progress
from gsa_train.metrics.record import IntervalClock, data_totals, reduce_step, step_record
from gsa_train.metrics.sinks import Sinks
from gsa_train.model.build import Model
from gsa_train.monitor.corruption import CorruptionCheck, needs_check
from gsa_train.monitor.monitor import READ_DELAY_STEPS, Monitor, MonitorState, SpikeFound
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.mcore import lr_multipliers
from gsa_train.parallel import Parallel
from gsa_train.phases import PhaseSpan
from gsa_train.profiling.profiler import StepProfiler
from gsa_train.profiling.spans import span as part
from gsa_train.run.stop_signals import Stopped
from gsa_train.run.stop_vote import StopVote
from gsa_train.run.watch import Watch
from gsa_train.run.work_time import StragglerWarning, slowest
from gsa_train.schedule import learning_rate
from gsa_train.step import StepResult, Training, train_step

LONGEST_WAIT_SHARE = 0.25
"""Of `parallel.timeout_minutes`, after which the watch ends a rank: between two tries of the last save."""


@dataclass
class Run:
    """What a run carries from phase to phase."""

    config: Config
    parallel: Parallel
    model: Model
    batches: TrainBatches
    validation_sets: list[ValidationSet]
    tokenizer: Tokenizer
    saver: CheckpointSaver
    sinks: Sinks | None
    """On the main rank."""
    progress: Progress | None
    """On the main rank."""
    wandb_run_id: str | None
    """On every rank."""
    stop_vote: StopVote
    watch: Watch
    profiler: StepProfiler
    straggler_warning: StragglerWarning
    phase_optimizer: PhaseOptimizer | None = None
    """Of the phase under way. Nothing else holds it from one phase to the next."""
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    validated: tuple[int, dict[str, Any]] | None = None
    """Step and result of the newest validation."""
    validation_due: bool = False
    """The run was stopped in the validation at this step."""
    monitor: MonitorState = field(default_factory=MonitorState)
    """Of the newest checkpoint, or of the end of the phase before."""
    skipped_steps: frozenset[int] = frozenset()
    """Steps, counted from 1, whose batches are read and not trained on."""
    skips_told: int = 0
    """Last step that an event of this start has named as left out."""
    records_late: bool = False
    """A step's record is written when the next step is launched: for a GPU, which would have nothing to do while the
    host writes."""

    def log(self, record: dict[str, Any]) -> None:
        if self.sinks is not None and self.progress is not None:
            self.sinks.log(record)
            self.progress.show(record)

    def log_step(self, record: dict[str, Any]) -> None:
        """The record of a step, perhaps late: by `write_late`, or before the next record."""
        if not self.records_late:
            self.log(record)
        elif self.sinks is not None and self.progress is not None:
            self.sinks.log_later(record)
            self.progress.show(record)

    def write_late(self) -> None:
        if self.sinks is not None:
            self.sinks.write_late()

    def message(self, text: str) -> None:
        if self.progress is not None:
            self.progress.message(text)


@dataclass
class _Current:
    """The phase under way: what its steps have in common, made anew for each phase."""

    span: PhaseSpan
    optimizer: PhaseOptimizer
    monitor: Monitor
    clock: IntervalClock
    training: Training


def _begin(run: Run, span: PhaseSpan, optimizer: PhaseOptimizer) -> _Current:
    config, device = run.config.monitor, run.parallel.device
    monitor = Monitor(config, span, device, run.monitor, run.log, partial(newest_save, run))
    check = None
    if needs_check(config):
        modules = optimizer.modules
        check = CorruptionCheck(config, run.model, modules, run.parallel, run.log, span.phase.name)
    training = Training(run.model, optimizer, run.config, run.parallel, monitor.detector, check)
    run.model.work_time.read_and_reset()  # of steps before, which were not logged
    return _Current(span, optimizer, monitor, IntervalClock(device), training)


def run_phase(run: Run, span: PhaseSpan, phase_optimizer: PhaseOptimizer) -> SpikeFound | None:
    """Train from `run.step` to the end of the phase, or up to a spike that asks for a rewind.

    Raises:
        MonitorStop: a spike ends the run.
        CorruptionFound: so do numbers that are not what they should be.
        Stopped: all ranks were asked to stop, and the checkpoint of this moment is on disk.
    """
    config = run.config
    current = _begin(run, span, phase_optimizer)
    monitor, clock = current.monitor, current.clock

    def stop_validation_if_asked() -> None:
        run.watch.note(run.step, "validating")
        reason = run.stop_vote.ask()
        if reason:
            _stop(run, current, reason, in_validation=True)

    if run.validation_due:
        clock.pause()
        validate(run, span.phase.name, stop_validation_if_asked)
        clock.resume()
        run.validation_due = False
    while run.step < span.end:
        reason = run.stop_vote.ask()
        # Read late, so that the host does not wait for the device; all of them before a stop.
        spike = monitor.read(run.step if reason else run.step - READ_DELAY_STEPS)
        if spike is not None:
            return spike
        if reason:
            _stop(run, current, reason)

        run.watch.note(run.step, "reading text")
        trains = run.step + 1 not in run.skipped_steps
        logged = trains and _is_logged(run.step + 1, span, config)
        run.profiler.before(run.step + 1)
        if trains:
            lr = learning_rate(span.phase, run.step - span.start) * monitor.lr_factor(run.step + 1)
            result = _train(run, current, lr, logged)
        else:
            clock.pause()
            _leave_out(run, span)
            clock.resume()
        run.write_late()

        # The step is done, and `run.step` counts it.
        saves = run.saver.is_due(run.step)
        validates = config.evaluate.every_steps > 0 and run.step % config.evaluate.every_steps == 0
        if logged or saves or validates or run.step == span.end:
            # Nothing is logged, validated or saved before what the monitor makes of it.
            spike = monitor.read(run.step)
            if spike is not None:
                return spike
        if logged:
            with part("logging"):
                _log(run, current, lr, result)
            report_saves(run, run.saver.ended(now=run.step))
        if saves or validates:
            run.write_late()
        run.profiler.after(run.step)
        if validates:
            clock.pause()
            validate(run, span.phase.name, stop_validation_if_asked)
            clock.resume()
        if saves or run.step == span.end:
            run.monitor = monitor.state()
        if saves:
            clock.pause()
            save(run, span, phase_optimizer)
            clock.resume()
    return None


def _stop(run: Run, current: _Current, reason: int, in_validation: bool = False) -> NoReturn:
    """Save and leave. Every step has been read."""
    run.write_late()
    run.validation_due = in_validation
    run.monitor = current.monitor.state()
    check = current.training.check
    if check is not None and not run.saver.has(run.step):
        with current.optimizer.whole_weights(changes=False):
            check.compare_replicas(run.step, saves=True)
    if run.step > 0:
        save_the_end(run, current.span, current.optimizer)
    raise Stopped(reason, run.step)


def newest_save(run: Run) -> int | None:
    """Step of the newest checkpoint, for the end by a spike: waits for the save under way, and tells of it."""
    for result in run.saver.ended(now=run.step, wait=True):
        log_save(run, result)
    return run.saver.durable_step


def _train(run: Run, current: _Current, lr: float, logged: bool) -> StepResult:
    """One step."""
    config = run.config
    run.model.runtime.measuring = logged
    waited = run.batches.wait_seconds
    run.model.work_time.begin()
    with part("data"):
        micro_batches = run.batches.next_step()
    run.watch.note(run.step, "training")
    is_last = run.step + 1 == sum(phase.steps for phase in config.phases)
    saves = is_last or run.saver.is_due(run.step + 1)
    result = train_step(current.training, micro_batches, lr, run.step, saves=saves)
    run.step += 1
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    run.tokens += tokens
    current.clock.count(tokens, run.batches.wait_seconds - waited)
    current.monitor.observe(run.step, result.verdict)
    return result


def _leave_out(run: Run, span: PhaseSpan) -> None:
    """A step whose batch is read and not trained on."""
    run.batches.next_step()
    run.step += 1
    if run.step > run.skips_told:
        last = run.step
        while last + 1 in run.skipped_steps and last < span.end:
            last += 1
        run.skips_told = last
        run.log({"event": "skipped_batches", "step": run.step, "phase": span.phase.name, "last_step": last})


def _log(run: Run, current: _Current, lr: float, result: StepResult) -> None:
    """The record of the step just done, whose verdict has been read. Collective."""
    config, parallel = run.config, run.parallel
    changed = current.optimizer.update_norm(result.verdict.applied, parallel)
    interval = current.clock.read_and_reset()
    reduced = reduce_step(
        run.model.runtime.stats,
        result.loss_sum,
        result.loss_tokens.item(),
        interval,
        parallel,
        data_totals(run.batches.counters, config.data),
        run.batches.checksum(),
        run.model.work_time.read_and_reset(),
        result.visible_keys,
    )
    if parallel.is_main:
        run.straggler_warning.look(run.step, *slowest(reduced.work_seconds))
    lrs = {name: lr * multiplier for name, multiplier in lr_multipliers(current.span.phase).items()}
    precision = "bf16" if run.model.mcore_config.bf16 else "fp32"
    record = step_record(
        run.step,
        current.span.phase,
        lrs,
        current.monitor.last_grad_norm,
        run.tokens,
        reduced,
        interval,
        config,
        parallel,
        precision,
    )
    record |= {"update_norm": changed.item(), **current.monitor.metrics()}
    run.log_step(record)
    current.monitor.watch_layers(run.step, record)


def _is_logged(step: int, span: PhaseSpan, config: Config) -> bool:
    """The first and the last step of a phase, and every so many; the same whether or not a run was resumed."""
    return step % config.logging.every_steps == 0 or step in (span.start + 1, span.end)


def validate(run: Run, phase_name: str, stop_if_asked: Callable[[], None]) -> dict[str, Any]:
    """Score the validation sets and log it, unless this step has been scored. Collective."""
    if run.validated is not None and run.validated[0] == run.step:
        return run.validated[1]
    result = evaluate(
        run.model, run.validation_sets, run.tokenizer.eos_id, run.config, run.parallel, stop_if_asked
    )
    run.log({"event": "validation", "step": run.step, "phase": phase_name, "tokens": run.tokens, **result})
    run.validated = (run.step, result)
    return result


def save(run: Run, span: PhaseSpan, phase_optimizer: PhaseOptimizer) -> None:
    """Begin a checkpoint of this moment, unless this step has one. Collective.

    Raises:
        CheckpointError: too many saves in a row have failed.
    """
    if run.saver.has(run.step):
        return
    parallel = run.parallel
    run.watch.note(run.step, "saving")
    state = RunState(
        step=run.step,
        tokens=run.tokens,
        phase_index=span.index,
        phase_name=span.phase.name,
        phase_start=span.start,
        data=run.batches.state(),
        wandb_run_id=run.wandb_run_id,
        config_yaml=config_to_yaml(run.config),
        layout=parallel.layout,
        rng=gather_rng(parallel),
        validation_due=run.validation_due,
        monitor=asdict(run.monitor),
    )
    report_saves(run, run.saver.begin(state, run.model, phase_optimizer))


def save_the_end(run: Run, span: PhaseSpan, phase_optimizer: PhaseOptimizer) -> None:
    """Write the last checkpoint of the run and wait until it is durable. Collective.

    No step is left in which to try again, so this waits, twice as long each time, as far as that does not look like a
    hang.

    Raises:
        CheckpointError: too many saves in a row have failed.
    """
    save(run, span, phase_optimizer)
    report_saves(run, run.saver.ended(now=run.step, wait=True))
    longest_wait_seconds = LONGEST_WAIT_SHARE * 60 * run.config.parallel.timeout_minutes
    while not run.saver.has(run.step):
        time.sleep(min(2.0 ** (run.saver.failures - 1), longest_wait_seconds))
        save(run, span, phase_optimizer)
        report_saves(run, run.saver.ended(now=run.step, wait=True))


def report_saves(run: Run, results: list[SaveResult]) -> None:
    """Tell how saves ended.

    Raises:
        CheckpointError: too many in a row have failed.
    """
    for result in results:
        log_save(run, result)
    run.saver.check()


def log_save(run: Run, result: SaveResult) -> None:
    """To metrics and screen."""
    record = {
        "event": "checkpoint" if result.error is None else "checkpoint_failed",
        "step": result.step,
        "phase": result.phase,
        "checkpoint_stall_seconds": result.stall_seconds,
        "checkpoint_save_seconds": result.save_seconds,
    }
    if result.error is None:
        run.log({**record, "checkpoint_bytes": result.bytes})
        run.message(
            f"saved {result.folder} ({result.bytes / 1e9:.3g} GB; training waited {result.stall_seconds:.2f} s "
            f"of {result.save_seconds:.2f} s)"
        )
    else:
        run.log({**record, "checkpoint_error": result.error, "checkpoint_failures": run.saver.failures})
        run.message(f"step {result.step} could not be saved: {result.error}; {run.saver.next_try()}")
    for warning in result.warnings:
        run.message(f"checkpoint: {warning}")
