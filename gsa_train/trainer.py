"""The loop over one phase. What a step does is planned in gsa_train/plan.py, and done here."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from gsa_train.metrics.record import (
    IntervalClock,
    LoggedStep,
    Measured,
    Reduced,
    data_totals,
    send_step,
    step_record,
)
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.micro_batch_graph import new_graph
from gsa_train.phases import PhaseRange, learning_rate, lr_multipliers
from gsa_train.plan import StepPlan, plan_step
from gsa_train.profiling.trace_spans import trace_span
from gsa_train.profiling.work_time import slowest
from gsa_train.reliability.monitor.corruption import CorruptionCheck, needs_check
from gsa_train.reliability.monitor.monitor import READ_DELAY_STEPS, Monitor, SpikeFound
from gsa_train.reliability.stop_signals import FOLDER_GONE, Stopped, reason_in_words
from gsa_train.run.blind_indexer import BlindIndexerWarning
from gsa_train.run.dense_queries import dense_queries_warning
from gsa_train.run.saves import newest_save, report_saves, save, save_the_end
from gsa_train.run.state import Run
from gsa_train.run.tasks_in_turn import score_tasks_in_turn
from gsa_train.run.validate import validate
from gsa_train.step import StepResult, Training, train_step

logger = logging.getLogger(__name__)


@dataclass
class _ActivePhase:
    """The phase under way: what its steps have in common, made anew for each phase."""

    range: PhaseRange
    optimizer: PhaseOptimizer
    monitor: Monitor
    clock: IntervalClock
    training: Training
    blind_indexer: BlindIndexerWarning
    known_kinds: set[tuple[bool, bool]] = field(default_factory=set)
    """Of steps of this phase that this process has done: the first one of each compiles."""
    first_wait_seconds: float | None = None
    """That the first step waited for text; None once a step behind it is logged, and before it."""


def _enter(run: Run, phase_range: PhaseRange, optimizer: PhaseOptimizer) -> _ActivePhase:
    config, device, log = run.config.monitor, run.parallel.device, run.services.log.log
    monitor = Monitor(config, phase_range, device, run.state.monitor, log, partial(newest_save, run))
    check = None
    if needs_check(config):
        modules, name = optimizer.modules, phase_range.phase.name
        check = CorruptionCheck(config, run.model, modules, run.parallel, log, name)
    graph = new_graph(optimizer, run.config)
    saver = run.services.saver
    training = Training(
        run.model, optimizer, run.config, run.parallel, monitor.detector, check, graph, saver.hold_update
    )
    saver.reserve(run.model, optimizer)
    run.model.work_time.reset()  # of steps before, which were not logged
    run.services.watchdog.begin_phase()
    blind_indexer = BlindIndexerWarning(phase_range.phase, phase_range.start)
    return _ActivePhase(phase_range, optimizer, monitor, IntervalClock(device), training, blind_indexer)


def run_phase(run: Run, phase_range: PhaseRange, phase_optimizer: PhaseOptimizer) -> SpikeFound | None:
    """Train from the run's step to the end of the phase, or up to a spike that asks for a rewind.

    Raises:
        MonitorStop: a spike ends the run.
        CorruptionFound: so do numbers that are not what they should be.
        Stopped: all ranks were asked to stop, and the checkpoint of this moment is on disk.
    """
    state, services = run.state, run.services
    clock = services.goodput.clock
    phase = _enter(run, phase_range, phase_optimizer)
    clock.begin("training")
    if state.validation_due:
        _validate(run, phase)
        state.validation_due = False
    if state.tasks_due:
        _score_tasks(run, phase)
    while state.step < phase_range.end:
        plan = plan_step(
            state.step + 1,
            phase_range,
            run.config,
            skipped_steps=run.skipped_steps,
            steps_before_start=run.start.step,
            save_is_due=services.saver.is_due(state.step + 1),
        )
        reason_to_stop = services.stop_vote.ask()
        # Read late, so that the host does not wait for the device; but before a stop, all steps.
        spike = phase.monitor.read(state.step if reason_to_stop else state.step - READ_DELAY_STEPS)
        if spike is not None:
            return spike
        if reason_to_stop:
            _stop(run, phase, reason_to_stop)

        services.watchdog.heartbeat(state.step, "reading text")
        services.profiler.before(plan.step)
        is_first = plan.trains and not phase.known_kinds
        if is_first:
            clock.begin("first_step")
        if plan.trains:
            lr = learning_rate(phase_range.phase, state.step - phase_range.start)
            lr *= phase.monitor.lr_factor(plan.step)
            result = _train(run, phase, plan, lr)
        else:
            _leave_out(run, phase, plan)
        _write_late(run)  # the record of the step before, while the device is busy with this one

        if plan.reads_monitor:
            spike = phase.monitor.read(plan.step)
            if spike is not None:
                return spike
        if plan.logs:
            with trace_span("logging"):
                _log(run, phase, lr, result)
            report_saves(run, services.saver.ended(now=plan.step))
        if plan.saves or plan.validates or plan.scores_tasks or plan.ends_phase:
            _write_late(run)
        with services.watchdog.during("logging"):
            services.profiler.after(plan.step)
        if is_first:
            services.goodput.note(plan.step, phase_range.phase.name)
            said = services.goodput.start_up_in_words()
            clock.begin("training")
            if said is not None:
                services.log.message(said)
        state.tasks_due = plan.scores_tasks
        if plan.validates:
            _validate(run, phase)
        if plan.saves or plan.ends_phase:
            state.monitor = phase.monitor.state()
        if plan.saves:
            with phase.clock.paused():
                save(run, phase_range, phase_optimizer)
        if plan.scores_tasks:  # behind the save, for they may take long, and an error in them costs no step
            _score_tasks(run, phase)
    services.watchdog.heartbeat(state.step, "starting")  # the next phase, or the end
    services.goodput.note(state.step, phase_range.phase.name)
    clock.begin("other")
    return None


def _write_late(run: Run) -> None:
    with run.services.watchdog.during("logging"):  # a file system may stand still
        run.services.log.write_late()


def _train(run: Run, phase: _ActivePhase, plan: StepPlan, lr: float) -> StepResult:
    """Train one step; the state counts it."""
    state, batches, train = run.state, run.data.batches, run.config.train
    waited = batches.wait_seconds
    run.model.work_time.begin()
    with trace_span("data"):
        micro_batches = batches.next_step()
    if state.step == run.start.step and run.parallel.is_main:
        said = dense_queries_warning(run.config, micro_batches)
        if said is not None:
            logger.warning(said)
    kind = plan.logs, plan.weights_are_kept
    run.services.watchdog.heartbeat(state.step, "training" if kind in phase.known_kinds else "compiling")
    result = train_step(
        phase.training, micro_batches, lr, state.step, saves=plan.weights_are_kept, measures=plan.logs
    )
    tokens = train.global_batch_size * train.seq_len_tokens
    state.step += 1
    state.tokens += tokens
    wait_seconds = batches.wait_seconds - waited
    if not phase.known_kinds:
        phase.first_wait_seconds = wait_seconds
    phase.known_kinds.add(kind)
    phase.clock.count(tokens, wait_seconds)
    phase.monitor.observe(state.step, result.verdict)
    return result


def _leave_out(run: Run, phase: _ActivePhase, plan: StepPlan) -> None:
    """Read a step's batch and do not train on it; the state counts the step."""
    with phase.clock.paused(), run.services.goodput.clock.during("other"):
        run.data.batches.next_step()
        run.state.step += 1
        if plan.left_out_through is not None:
            event = {"event": "skipped_batches", "step": plan.step, "phase": phase.range.phase.name}
            run.services.log.log({**event, "last_step": plan.left_out_through})


def _log(run: Run, phase: _ActivePhase, lr: float, result: StepResult) -> None:
    """Send the numbers of the step just done, whose verdict has been read, to the host, which makes their record late.
    Collective."""
    config, parallel, model, batches = run.config, run.parallel, run.model, run.data.batches
    interval = phase.clock.read_and_reset()
    run.state.task_clock.train_seconds += interval.seconds
    run.state.task_clock.train_steps += interval.steps
    totals, checksum = data_totals(batches.counters, config.data), batches.checksum()
    worked = model.work_time.read_and_reset()
    measured = Measured(interval, worked, totals, checksum, result.causal_keys, result.update_norm)
    reduced = send_step(model.runtime.stats, result.loss_sum, result.loss_tokens, measured, parallel)
    of_phase = phase.range.phase
    lrs = {name: lr * multiplier for name, multiplier in lr_multipliers(of_phase).items()}
    logged = LoggedStep(run.state.step, of_phase, lrs, phase.monitor.last_grad_norm, run.state.tokens)
    precision = "bf16" if model.mcore_config.bf16 else "fp32"
    of_monitor = phase.monitor.metrics()

    def make_and_log() -> None:
        numbers = reduced()
        if parallel.is_main:
            run.services.straggler_warning.look(logged.step, *slowest(numbers.work_seconds))
        record = step_record(logged, numbers, interval, config, parallel, precision)
        _note_time(run, phase, logged.step, numbers)
        record |= {"update_norm": numbers.update_norm, **of_monitor, **run.services.goodput.metrics()}
        run.services.log.log(record)
        phase.monitor.watch_layers(logged.step, record)
        if parallel.is_main:
            phase.blind_indexer.look(record)

    with run.services.watchdog.during("logging"):
        run.services.log.log_late(make_and_log)


def _note_time(run: Run, phase: _ActivePhase, step: int, reduced: Reduced) -> None:
    """What of the steps since the last logged one was no work."""
    goodput, work = run.services.goodput, reduced.work_seconds
    waited = reduced.part_seconds["data_wait"] - (phase.first_wait_seconds or 0.0)
    rank, ratio = slowest(work)
    slow = ratio >= run.config.logging.straggler_ratio
    slow &= phase.first_wait_seconds is None  # in the first step ranks differ, as they compile
    phase.first_wait_seconds = None
    held = run.services.saver.take_held_seconds()
    stragglers = work[rank] * (1 - 1 / ratio) if slow else 0.0
    goodput.clock.share_out({"text": waited, "stragglers": stragglers, "copies": held})
    goodput.note(step, phase.range.phase.name)


def _validate(run: Run, phase: _ActivePhase) -> None:
    """Validate between two steps, unless all ranks are asked to stop meanwhile."""

    def stop_if_asked() -> None:
        run.services.watchdog.heartbeat(run.state.step, "validating")
        reason = run.services.stop_vote.ask()
        if reason:
            _stop(run, phase, reason, in_validation=True)

    with phase.clock.paused(), run.services.goodput.clock.during("validation"):
        validate(run, phase.range.phase.name, stop_if_asked)


def _score_tasks(run: Run, phase: _ActivePhase) -> None:
    """Score `evaluate.tasks` between two steps, unless all ranks are asked to stop meanwhile."""

    def stop_if_asked() -> None:
        run.services.watchdog.heartbeat(run.state.step, "scoring tasks")
        reason = run.services.stop_vote.ask()
        if reason:
            _stop(run, phase, reason)

    with phase.clock.paused(), run.services.goodput.clock.during("tasks"):
        score_tasks_in_turn(run, phase.range.phase.name, stop_if_asked)
    run.state.tasks_due = False


def _stop(run: Run, phase: _ActivePhase, reason: int, in_validation: bool = False) -> NoReturn:
    """Save and leave. Every step has been read."""
    state, services = run.state, run.services
    services.log.write_late()
    state.validation_due = in_validation
    state.monitor = phase.monitor.state()
    check = phase.training.check
    if check is not None and not services.saver.has(state.step):
        with phase.optimizer.whole_weights(changes=False):
            check.compare_replicas(state.step, saves=True)
    if reason == FOLDER_GONE:
        services.saver.durable_step = None  # it went with the folder
    if state.step > 0:
        services.log.message(f"{reason_in_words(reason)}: saving a checkpoint at step {state.step}")
        save_the_end(run, phase.range, phase.optimizer)
    raise Stopped(reason, state.step)
