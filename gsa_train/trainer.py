"""The loop over one phase: step, log, validate, save; and what the monitor says to a spike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsa_data.tokenize import Tokenizer
from gsa_data.validation import ValidationSet
from gsa_train.batches import TrainBatches
from gsa_train.checkpoint import RunState, gather_rng, save_checkpoint
from gsa_train.config import Config, PhaseConfig, config_to_yaml
from gsa_train.evaluate import evaluate
from gsa_train.metrics import IntervalClock, reduce_step, step_record
from gsa_train.model.build import Model
from gsa_train.monitor import READ_DELAY_STEPS, Monitor, MonitorState, SpikeFound
from gsa_train.optim import PhaseOptimizer, lr_multipliers, update_norm
from gsa_train.parallel import Parallel
from gsa_train.phases import PhaseSpan
from gsa_train.progress import Progress
from gsa_train.schedule import learning_rate
from gsa_train.sinks import Sinks
from gsa_train.step import StepResult, train_step


@dataclass
class Run:
    """What a run carries from phase to phase."""

    config: Config
    parallel: Parallel
    model: Model
    batches: TrainBatches
    validation_sets: list[ValidationSet]
    tokenizer: Tokenizer
    checkpoints: Path
    sinks: Sinks | None
    """On the main rank."""
    progress: Progress | None
    """On the main rank."""
    wandb_run_id: str | None
    """On every rank."""
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    saved_step: int | None = None
    """Step of the newest checkpoint of this run."""
    validated: tuple[int, dict[str, Any]] | None = None
    """Step and result of the newest validation."""
    monitor: MonitorState = field(default_factory=MonitorState)
    """Of the newest checkpoint, or of the end of the phase before."""
    skipped_steps: frozenset[int] = frozenset()
    """Steps, counted from 1, whose batches are read and not trained on."""

    def log(self, record: dict[str, Any]) -> None:
        if self.sinks is not None and self.progress is not None:
            self.sinks.log(record)
            self.progress.show(record)


def run_phase(run: Run, span: PhaseSpan, phase_optimizer: PhaseOptimizer) -> SpikeFound | None:
    """Train from `run.step` to the end of the phase, or up to a spike that asks for a rewind.

    Raises:
        MonitorStop: a spike ends the run.
    """
    config, parallel = run.config, run.parallel
    monitor = Monitor(config.monitor, span, parallel.device, run.monitor, run.log)
    clock = IntervalClock(parallel.device)
    while run.step < span.end:
        found = monitor.read(run.step - READ_DELAY_STEPS, run.step, run.saved_step)
        if found is not None:
            return found
        trains = run.step + 1 not in run.skipped_steps
        logged = trains and _is_logged(run.step + 1, span, config)
        saves = (run.step + 1) % config.checkpoint.every_steps == 0
        if trains:
            lr = learning_rate(span.phase, run.step - span.start) * monitor.lr_factor(run.step + 1)
            result = _train(run, phase_optimizer, monitor, clock, lr, logged)
        else:
            clock.pause()
            _leave_out(run, span)
            clock.resume()
        if logged or saves or run.step == span.end:
            # Nothing is logged or saved before what the monitor makes of it.
            found = monitor.read(run.step, run.step, run.saved_step)
            if found is not None:
                return found
        if logged:
            _log(run, span.phase, phase_optimizer, monitor, clock, lr, result)
        every = config.evaluate.every_steps
        if every and run.step % every == 0:
            clock.pause()
            validate(run, span.phase.name)
            clock.resume()
        if saves or run.step == span.end:
            run.monitor = monitor.state()
        if saves:
            clock.pause()
            save(run, span, phase_optimizer)
            clock.resume()
    return None


def _train(
    run: Run, phase_optimizer: PhaseOptimizer, monitor: Monitor, clock: IntervalClock, lr: float, logged: bool
) -> StepResult:
    """One step."""
    config = run.config
    run.model.runtime.measuring = logged
    waited = run.batches.wait_seconds
    micro_batches = run.batches.next_step()
    result = train_step(
        run.model, phase_optimizer, micro_batches, lr, config, run.parallel, run.step, monitor.detector
    )
    run.step += 1
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    run.tokens += tokens
    clock.count(tokens, run.batches.wait_seconds - waited)
    monitor.observe(run.step, result.verdict)
    return result


def _leave_out(run: Run, span: PhaseSpan) -> None:
    """A step whose batch is read and not trained on."""
    run.batches.next_step()
    run.step += 1
    if run.step - 1 not in run.skipped_steps or run.step == span.start + 1:
        last = run.step
        while last + 1 in run.skipped_steps and last < span.end:
            last += 1
        run.log({"event": "skipped_batches", "step": run.step, "phase": span.phase.name, "last_step": last})


def _log(
    run: Run,
    phase: PhaseConfig,
    phase_optimizer: PhaseOptimizer,
    monitor: Monitor,
    clock: IntervalClock,
    lr: float,
    result: StepResult,
) -> None:
    """The record of the step just done, whose verdict has been read. Collective."""
    config, parallel = run.config, run.parallel
    changed = update_norm(phase_optimizer.optimizer, result.verdict.applied, parallel)
    interval = clock.read_and_reset()
    reduced = reduce_step(
        run.model.runtime.stats,
        result.loss_sum,
        result.loss_tokens.item(),
        interval,
        parallel,
        run.batches.counters,
    )
    lrs = {name: lr * multiplier for name, multiplier in lr_multipliers(phase).items()}
    precision = "bf16" if run.model.mcore_config.bf16 else "fp32"
    record = step_record(
        run.step,
        phase,
        lrs,
        monitor.last_grad_norm,
        run.tokens,
        reduced,
        interval,
        config,
        parallel,
        precision,
    )
    record |= {"update_norm": changed.item(), **monitor.metrics()}
    run.log(record)
    monitor.watch_layers(run.step, record)


def _is_logged(step: int, span: PhaseSpan, config: Config) -> bool:
    """The first and the last step of a phase, and every so many; the same whether or not a run was resumed."""
    return step % config.logging.every_steps == 0 or step in (span.start + 1, span.end)


def validate(run: Run, phase_name: str) -> dict[str, Any]:
    """Score the validation sets and log it, unless this step has been scored. Collective."""
    if run.validated is not None and run.validated[0] == run.step:
        return run.validated[1]
    result = evaluate(run.model, run.validation_sets, run.tokenizer.eos_id, run.config, run.parallel)
    run.log({"event": "validation", "step": run.step, "phase": phase_name, "tokens": run.tokens, **result})
    run.validated = (run.step, result)
    return result


def save(run: Run, span: PhaseSpan, phase_optimizer: PhaseOptimizer) -> None:
    """Write a checkpoint of this moment, unless this step has one. Collective."""
    if run.saved_step == run.step:
        return
    parallel = run.parallel
    state = RunState(
        step=run.step,
        tokens=run.tokens,
        phase_index=span.index,
        phase_name=span.phase.name,
        phase_start=span.start,
        data=run.batches.state(),
        wandb_run_id=run.wandb_run_id,
        config_yaml=config_to_yaml(run.config),
        layout=(parallel.tensor_size, parallel.pipeline_size, parallel.data_size),
        rng=gather_rng(parallel),
        monitor=asdict(run.monitor),
    )
    folder = save_checkpoint(
        run.checkpoints, state, run.model, phase_optimizer, parallel, run.config.checkpoint.keep_last
    )
    run.saved_step = run.step
    if run.progress is not None:
        run.progress.message(f"saved {folder}")
