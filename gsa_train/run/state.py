"""Define the state of a run that lasts across phases: progress, data, model and services."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gsa_data.tokenize import Tokenizer
from gsa_data.validation import ValidationSet
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import Config
from gsa_train.data.batches import TrainBatches
from gsa_train.distributed.parallel import Parallel
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.profiling.profiler import StepProfiler
from gsa_train.reliability.hang_watchdog import HangWatchdog
from gsa_train.reliability.monitor.monitor import MonitorState
from gsa_train.reliability.stop_vote import StopVote
from gsa_train.run.run_log import RunLog
from gsa_train.run_folder.resume import Start
from gsa_train.services import Service
from gsa_train.validation.loop_tasks import PreparedTask
from gsa_train.validation.tasks import TaskClock


@dataclass
class TrainState:
    """Progress of the run. Checkpoints store the progress with weights, optimizer state and position in the text."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Number of tokens trained on."""
    validation_due: bool = False
    """True until the validation of this step, if one is due, has ended."""
    tasks_due: bool = False
    """True while tasks are due at this step but not yet scored. A restart from a checkpoint with True scores the
    tasks."""
    task_clock: TaskClock = field(default_factory=TaskClock)
    monitor: MonitorState = field(default_factory=MonitorState)
    """State of the monitor at the newest checkpoint or at the end of the previous phase."""


@dataclass
class Data:
    batches: TrainBatches
    validation_sets: list[ValidationSet]
    tokenizer: Tokenizer
    tasks: list[PreparedTask] = field(default_factory=list)
    """Prepared tasks of `evaluate.tasks`."""


@dataclass(frozen=True)
class Services:
    """Services of this process. Checkpoints do not store them."""

    log: RunLog
    saver: CheckpointSaver
    watchdog: HangWatchdog
    profiler: StepProfiler
    stop_vote: StopVote
    goodput: GoodputLog


@dataclass
class Run:
    config: Config
    parallel: Parallel
    model: Model
    data: Data
    services: Services
    start: Start
    """Start of this process."""
    state: TrainState
    run_id: str = ""
    """gsa_train.run_folder.starts.new_run_id"""
    phase_optimizer: PhaseOptimizer | None = None
    """Optimizer of the current phase. Between phases this must be the only reference, so that it can be freed."""
    newest_validation: tuple[int, dict[str, Any]] | None = None
    """Step and result of the newest validation, so that no step is validated twice."""
    newest_tasks_step: int | None = None
    """Newest step at which this process scored or left out tasks."""
    listening: list[Service] = field(default_factory=list)
    """Services that the training loop calls, in call order (`services_of` in train.py)."""
