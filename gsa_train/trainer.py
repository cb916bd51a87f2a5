"""Run the training loop of one phase.

The loop plans each step (gsa_train/plan.py), trains it, and calls the services (`run.listening`) at each event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from gsa_train.config.batch_ramp import batch_size
from gsa_train.metrics.record import IntervalClock, Measured, data_totals, send_step, step_record
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.micro_batch_graph import new_graph
from gsa_train.phases import PhaseRange, in_batches, learning_rate, lr_multipliers
from gsa_train.plan import plan_step
from gsa_train.profiling.trace_spans import trace_span
from gsa_train.reliability.monitor.corruption import CorruptionCheck, needs_check
from gsa_train.reliability.monitor.monitor import READ_DELAY_STEPS, Monitor
from gsa_train.reliability.stop_signals import FOLDER_GONE, Stopped, reason_in_words
from gsa_train.run.saves import newest_save, report_saves, save, save_the_end
from gsa_train.run.state import Run
from gsa_train.run.validate import validate, validate_tasks
from gsa_train.services import StepPlan
from gsa_train.step import StepResult, Training, train_step


@dataclass
class _ActivePhase:
    range: PhaseRange
    optimizer: PhaseOptimizer
    monitor: Monitor
    clock: IntervalClock
    training: Training
    lr: float = 0.0
    """Learning rate of the newest trained step."""


def _enter(run: Run, phase_range: PhaseRange, optimizer: PhaseOptimizer) -> _ActivePhase:
    config, device, log = run.config.monitor, run.parallel.device, run.services.log.log
    monitor = Monitor(config, phase_range, device, run.state.monitor, log, partial(newest_save, run))
    check = None
    if needs_check(config):
        modules, name = optimizer.modules, phase_range.phase.name
        check = CorruptionCheck(config, run.model, modules, run.parallel, log, name)
    graph = new_graph(optimizer, run.config)
    if not optimizer.updates:
        optimizer.start_average()
    saver = run.services.saver
    training = Training(
        run.model, optimizer, run.config, run.parallel, monitor.detector, check, graph, saver.hold_update
    )
    saver.reserve(run.model, optimizer)
    run.model.work_time.reset()  # Drop the time of earlier steps, which were not logged.
    phase = _ActivePhase(phase_range, optimizer, monitor, IntervalClock(device), training)
    for service in run.listening:
        service.begin_phase(phase_range.phase, phase_range.start)
    return phase


def run_phase(run: Run, phase_range: PhaseRange, phase_optimizer: PhaseOptimizer) -> None:
    """Train from `run.state.step` to the end of the phase.

    Raises:
        MonitorStop: a spike ends the run.
        CorruptionFound: a check found wrong results or weights that differ between ranks.
        Stopped: the ranks agreed on a stop; a checkpoint of the current step is on disk.
    """
    state = run.state
    phase = _enter(run, phase_range, phase_optimizer)
    _validate(run, phase)
    _score_tasks(run, phase)
    while state.step < phase_range.end:
        step, started = state.step + 1, run.start.step
        due = run.services.saver.is_due(step)
        plan = plan_step(step, phase_range, run.config, steps_before_start=started, save_is_due=due)
        reason = run.services.stop_vote.ask()
        # Verdicts are read some steps late, so that the host does not wait for the device. Before a stop all are read.
        phase.monitor.read(state.step if reason else state.step - READ_DELAY_STEPS)
        if reason:
            _stop(run, phase, reason)
        for service in run.listening:
            service.before_step(plan)
        result = _train(run, phase, plan)
        _write_late(run)  # write the previous step's record while the device computes
        if plan.reads_monitor:
            phase.monitor.read(plan.step)
        if plan.logs and result is not None:
            _log(run, phase, result)
        if plan.pauses:
            _write_late(run)
        with run.services.watchdog.during("logging"):
            for service in run.listening:
                service.after_step(plan)
        state.validation_due, state.tasks_due = plan.validates, plan.scores_tasks
        _validate(run, phase)
        if plan.saves or plan.ends_phase:
            state.monitor = phase.monitor.state()
        if plan.saves:
            with phase.clock.paused():
                save(run, phase_range, phase_optimizer)
        _score_tasks(run, phase)
    for service in run.listening:
        service.end_phase(state.step)


def _write_late(run: Run) -> None:
    with run.services.watchdog.during("logging"):  # a file system may hang
        run.services.log.write_late()


def _train(run: Run, phase: _ActivePhase, plan: StepPlan) -> StepResult | None:
    """Train one step, or read its batch and skip the step (returns None). Increment the step in both cases."""
    if not plan.trains:
        _leave_out(run, phase, plan)
        return None
    state, batches, train = run.state, run.data.batches, run.config.train
    waited = batches.wait_seconds
    run.model.work_time.begin()
    with trace_span("data"):
        micro_batches = batches.next_step(state.step)
    wait_seconds = batches.wait_seconds - waited
    for service in run.listening:
        service.on_batch(plan, micro_batches, wait_seconds)
    phase.lr = learning_rate(*in_batches(train, phase.range, state.step))
    result = train_step(
        phase.training, micro_batches, phase.lr, state.step, saves=plan.weights_are_kept, measures=plan.logs
    )
    tokens = batch_size(train, state.step) * train.seq_len_tokens
    state.step += 1
    state.tokens += tokens
    phase.clock.count(tokens, wait_seconds)
    phase.monitor.observe(state.step, result.verdict)
    return result


def _leave_out(run: Run, phase: _ActivePhase, plan: StepPlan) -> None:
    with phase.clock.paused(), run.services.goodput.clock.during("other"):
        run.data.batches.next_step(run.state.step)
        run.state.step += 1
        if plan.left_out_through is not None:
            event = {"event": "skipped_batches", "step": plan.step, "phase": phase.range.phase.name}
            run.services.log.log({**event, "last_step": plan.left_out_through})


def _log(run: Run, phase: _ActivePhase, result: StepResult) -> None:
    """Log the newest step, whose verdict has been read, and the saves that have ended. Collective."""
    with trace_span("logging"):
        make_and_log = _late_record(run, phase, result)
        with run.services.watchdog.during("logging"):
            run.services.log.log_late(make_and_log)
    report_saves(run, run.services.saver.ended(now=run.state.step))


def _late_record(run: Run, phase: _ActivePhase, result: StepResult) -> Callable[[], None]:
    """Start to copy the step's numbers to the host. Return a function that builds and logs their record. Collective."""
    config, parallel, model, batches = run.config, run.parallel, run.model, run.data.batches
    interval = phase.clock.read_and_reset()
    run.state.task_clock.train_seconds += interval.seconds
    run.state.task_clock.train_steps += interval.steps
    totals, checksum = data_totals(batches.counters, config.data), batches.checksum()
    worked = model.work_time.read_and_reset()
    measured = Measured(
        interval, worked, totals, checksum, result.causal_keys, result.update_norm, result.z_loss_sum
    )
    reduced = send_step(model.runtime.stats, result.loss_sum, result.loss_tokens, measured, parallel)
    of_phase = phase.range.phase
    lrs = {name: phase.lr * multiplier for name, multiplier in lr_multipliers(of_phase).items()}
    known: dict[str, Any] = {"step": run.state.step, "phase": of_phase.name, "tokens": run.state.tokens}
    known |= {"grad_norm": phase.monitor.last_grad_norm, "lr": lrs.get("base", max(lrs.values())), "lrs": lrs}
    if config.train.batch_ramp:
        known["global_batch_size"] = batch_size(config.train, run.state.step - 1)
    known |= phase.monitor.metrics()
    precision = "bf16" if model.mcore_config.bf16 else "fp32"

    def make_and_log() -> None:
        numbers = reduced()
        record = known | step_record(numbers, interval, of_phase, config, parallel, precision)
        for service in run.listening:
            service.on_record(record, numbers)
        run.services.log.log(record)
        phase.monitor.watch_layers(record["step"], record)

    return make_and_log


def _validate(run: Run, phase: _ActivePhase) -> None:
    """Validate between two steps if validation is due. The validation ends early if the ranks agree on a stop."""
    if run.state.validation_due:
        stop_if_asked = partial(_stop_if_asked, run, phase, "validating")
        with phase.clock.paused(), run.services.goodput.clock.during("validation"):
            validate(run, phase.range.phase.name, stop_if_asked)
        run.state.validation_due = False


def _score_tasks(run: Run, phase: _ActivePhase) -> None:
    """Score `evaluate.tasks` between two steps if they are due. Scoring ends early if the ranks agree on a stop."""
    if run.state.tasks_due:
        stop_if_asked = partial(_stop_if_asked, run, phase, "scoring tasks")
        with phase.clock.paused(), run.services.goodput.clock.during("tasks"):
            validate_tasks(run, phase.range.phase.name, stop_if_asked)
        run.state.tasks_due = False


def _stop_if_asked(run: Run, phase: _ActivePhase, activity: str) -> None:
    run.services.watchdog.heartbeat(run.state.step, activity)
    reason = run.services.stop_vote.ask()
    if reason:
        _stop(run, phase, reason, in_validation=activity == "validating")


def _stop(run: Run, phase: _ActivePhase, reason: int, in_validation: bool = False) -> NoReturn:
    """Save a checkpoint and raise `Stopped`. The monitor's verdicts on all steps must have been read."""
    state, services = run.state, run.services
    services.log.write_late()
    state.validation_due = in_validation
    state.monitor = phase.monitor.state()
    check = phase.training.check
    if check is not None and not services.saver.has(state.step):
        with phase.optimizer.whole_weights(changes=False):
            check.compare_replicas(state.step, saves=True)
    if reason == FOLDER_GONE:
        services.saver.durable_step = None  # the checkpoint was deleted with the folder
    if state.step > 0:
        services.log.message(f"{reason_in_words(reason)}: saving a checkpoint at step {state.step}")
        save_the_end(run, phase.range, phase.optimizer)
    raise Stopped(reason, state.step)
