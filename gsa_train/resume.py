"""Where a run starts: at step 0, or at a checkpoint that fits its config."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from gsa_data.stream import StateMismatch
from gsa_data.tokenize import Tokenizer
from gsa_train.batches import TrainBatches
from gsa_train.checkpoint import RunState, find_checkpoint, read_run_state, recover_folder, restore_rng
from gsa_train.cli import Arguments
from gsa_train.config import Config
from gsa_train.monitor import MonitorState, state_of
from gsa_train.parallel import Parallel
from gsa_train.phases import PhaseSpan

logger = logging.getLogger(__name__)


class ResumeError(ValueError):
    """A checkpoint that cannot continue this config; says what differs and what to do."""


@dataclass(frozen=True)
class Start:
    """The beginning of this process's part of the run."""

    checkpoint: Path | None = None
    state: RunState | None = None
    phase_index: int = 0
    """Phase to enter first."""
    inside_phase: bool = False
    """The checkpoint was written in that phase, so its optimizer goes on, too."""
    same_run: bool = False
    """The checkpoint belongs to this run folder: its metrics and its W&B run go on."""

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0

    @property
    def tokens(self) -> int:
        return self.state.tokens if self.state else 0

    @property
    def monitor(self) -> MonitorState:
        return state_of(self.state.monitor) if self.state else MonitorState()

    @property
    def data_state(self) -> dict[str, Any] | None:
        return self.state.data if self.state else None

    def restore_rng(self, parallel: Parallel) -> None:
        """Random numbers go on where they were, if every rank finds its own."""
        assert self.state is not None
        layout = (parallel.tensor_size, parallel.pipeline_size, parallel.data_size)
        if not restore_rng(self.state, layout, parallel.rank) and parallel.is_main:
            logger.warning(
                "the checkpoint's layout was tensor x pipeline x data = %s, now it is %s: random-number "
                "generators start from run.seed",
                "x".join(map(str, self.state.layout)),
                "x".join(map(str, layout)),
            )


def run_dir(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def choose_start(config: Config, arguments: Arguments, spans: list[PhaseSpan], parallel: Parallel) -> Start:
    """--resume-from, else the run folder's latest checkpoint unless --no-resume, else step 0. Collective.

    Raises:
        ResumeError: the checkpoint is missing or incomplete, or of another model or sequence of phases.
    """
    own = run_dir(config)
    if parallel.is_main:
        recover_folder(own / "checkpoints")
    dist.barrier()
    if arguments.no_resume:
        return Start()
    folder = Path(arguments.resume_from) if arguments.resume_from else own
    try:
        checkpoint = find_checkpoint(folder)
    except FileNotFoundError as error:
        raise ResumeError(str(error)) from error
    if checkpoint is None:
        if arguments.resume_from:
            raise ResumeError(
                f"--resume-from {folder}: no complete checkpoint there; give a step_* folder, or a run folder"
            )
        return Start()
    return start_from(checkpoint, config, spans)


def start_from(checkpoint: Path, config: Config, spans: list[PhaseSpan]) -> Start:
    """The start that a checkpoint means.

    Raises:
        ResumeError: it is of another model or sequence of phases.
    """
    try:
        state = read_run_state(checkpoint)
    except ValueError as error:
        raise ResumeError(str(error)) from error
    _check_same_model(config, state, checkpoint)
    _check_same_phases(state, spans, checkpoint)
    finished = state.step == spans[state.phase_index].end
    last = state.phase_index == len(spans) - 1
    return Start(
        checkpoint=checkpoint,
        state=state,
        phase_index=state.phase_index + 1 if finished and not last else state.phase_index,
        inside_phase=last or not finished,
        same_run=checkpoint.resolve().parent.parent == run_dir(config).resolve(),
    )


def open_batches(
    config: Config, arguments: Arguments, start: Start, tokenizer: Tokenizer, parallel: Parallel
) -> TrainBatches:
    """The text from where the run stands. Collective.

    With --accept-new-data, a checkpoint of other text or of another order (shards, text_field, seed, num_lanes,
    shuffle_documents) goes on from epoch 0 of the config's; step, schedule, optimizer and counters go on. Where the
    text is the checkpoint's, the option does nothing, so a job that starts itself again may keep it.

    Raises:
        ResumeError: the checkpoint's position is of other text, or of another tokenizer.
        DataFault: the text cannot be opened.
    """
    try:
        return TrainBatches(config, parallel, tokenizer, start.data_state, arguments.accept_new_data)
    except StateMismatch as error:
        remedy = (
            "\nTo go on at this step from the beginning of the config's text, add --accept-new-data."
            if error.other_data and not arguments.accept_new_data
            else ""
        )
        raise ResumeError(f"{start.checkpoint} cannot go on with this data:\n{error}{remedy}") from error


MAY_CHANGE = ("attention_impl", "attention_kernel", "dense_attention", "indexer_loss_row_fraction")
"""Fields of `gsa` that say who computes, or how exactly the indexer loss is estimated."""


def _check_same_model(config: Config, state: RunState, checkpoint: Path) -> None:
    """Everything that shapes the weights or gives them their meaning must be as it was. A field that the checkpoint
    does not know is younger than it, and stood at its default."""
    saved = yaml.safe_load(state.config_yaml)
    lines = []
    for section in ("model", "gsa"):
        part = getattr(config, section)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            before = saved[section].get(field.name, field.default)
            if before != value and not (section == "gsa" and field.name in MAY_CHANGE):
                lines.append(f"  {section}.{field.name} = {value}: the checkpoint has {before}")
    if lines:
        raise ResumeError(
            f"{checkpoint} holds another model:\n" + "\n".join(lines) + "\nSet these fields as they were, or "
            "start a new run (another run.name, or --no-resume)."
        )


def _check_same_phases(state: RunState, spans: list[PhaseSpan], checkpoint: Path) -> None:
    remedy = (
        "Keep the phases up to this one as they were, or start a new run (another run.name, or --no-resume)."
    )
    if state.phase_index >= len(spans):
        raise ResumeError(
            f"{checkpoint} was written in phase {state.phase_index} ({state.phase_name}), but the config has "
            f"{len(spans)} phases. {remedy}"
        )
    span = spans[state.phase_index]
    if span.phase.name != state.phase_name or span.start != state.phase_start:
        raise ResumeError(
            f"{checkpoint} was written in phase {state.phase_name}, which began at step {state.phase_start}; "
            f"in the config phase {state.phase_index} is {span.phase.name} and begins at step {span.start}. "
            f"{remedy}"
        )
    trained = yaml.safe_load(state.config_yaml)["phases"][state.phase_index]["train"]
    if trained != span.phase.train:
        raise ResumeError(
            f"{checkpoint} was written while phase {state.phase_name} trained {trained}; in the config "
            f"phases.{state.phase_index}.train = {span.phase.train}, which its optimizer does not fit. {remedy}"
        )
    if state.step > span.end:
        raise ResumeError(
            f"{checkpoint} stands at step {state.step}, but phase {span.phase.name} now ends at {span.end}. "
            f"{remedy}"
        )
