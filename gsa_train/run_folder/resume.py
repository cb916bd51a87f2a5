"""Choose where a run starts: at step 0, or at a checkpoint that fits its config."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gsa_data.stream import StateMismatch
from gsa_data.tokenize import Tokenizer
from gsa_train.arguments import Arguments
from gsa_train.checkpoint.damage import find_damage
from gsa_train.checkpoint.files import find_checkpoint, pass_over, put_back, resume_candidates
from gsa_train.checkpoint.guarded import read_common
from gsa_train.checkpoint.load import RunState, read_run_state, set_local_rng
from gsa_train.config import Config, TrainConfig, saved_sections
from gsa_train.config.other_names import REMOVED, WHY_REMOVED
from gsa_train.data.batches import TrainBatches
from gsa_train.distributed.objects import on_main
from gsa_train.distributed.parallel import Parallel
from gsa_train.phases import PhaseRange
from gsa_train.run_folder.job_start import is_restart
from gsa_train.run_folder.paths import run_dir
from gsa_train.run_folder.spike_stop import refuse_same_spike
from gsa_train.run_folder.starts import run_id_of

logger = logging.getLogger(__name__)


class ResumeError(ValueError):
    """The checkpoint cannot continue this config. The message says what differs and what to do."""


@dataclass(frozen=True)
class Start:
    """Describes where this process starts: at step 0 or at a checkpoint."""

    checkpoint: Path | None = None
    state: RunState | None = None
    phase_index: int = 0
    """Index of the first phase to train."""
    inside_phase: bool = False
    """True if the optimizer's state is also loaded, because the first phase to train wrote the checkpoint or has
    `keep_optimizer`."""
    same_run: bool = False
    """True if the checkpoint belongs to this run folder, whose metrics and W&B run continue."""
    damaged: tuple[tuple[str, str], ...] = ()
    """(name, fault) of newer checkpoints that were skipped."""
    same_job: bool = False
    """True at step 0 if an earlier start of this job saved no checkpoint."""
    unchecked: bool = False
    """True if the checksums of tensor files are still to be checked, while they are loaded."""
    by_name: bool = False
    """True if --resume-from names the checkpoint."""

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0

    def restore_rng(self, parallel: Parallel) -> None:
        """Restore the random-number generators if the checkpoint has a state for every rank. Otherwise log a
        warning."""
        assert self.state is not None
        before, now = ("x".join(map(str, each)) for each in (self.state.layout, parallel.layout))
        if before != now:
            what = (
                f"the checkpoint's layout was tensor x pipeline x data x context = {before}, now it is {now}"
            )
        elif len(self.state.rng[parallel.rank]["cuda"]) != len(torch.cuda.get_rng_state()):
            what = "the checkpoint is of another kind of device"  # a run on CPUs saved a CPU state
        else:
            set_local_rng(self.state.rng[parallel.rank])
            return
        if parallel.is_main:
            logger.warning("%s: random-number generators start from run.seed", what)


def choose_start(
    config: Config,
    arguments: Arguments,
    ranges: list[PhaseRange],
    parallel: Parallel,
    tensors_later: bool = False,
) -> Start:
    """Choose the checkpoint or step to start from. Collective.

    With --resume-from, choose the checkpoint that this option names. With --no-resume, choose step 0. Without these
    options, choose the newest intact checkpoint of the run folder, or step 0 if the folder has no checkpoint.

    --resume-from and --no-resume are for the first start of a job. A restart ignores --no-resume, and ignores
    --resume-from if the run folder has a checkpoint. `set_damaged_aside` renames damaged checkpoints later, after the
    checks that can refuse the start.

    Args:
        tensors_later: do not check tensor files here. The caller checks them while it loads them, and calls
            `choose_again` if a file is damaged.

    Raises:
        SpikeAhead: the monitor stopped the run, and this start would meet the same spike.
        ResumeError: the checkpoint is missing or incomplete, or has another model or other phases.
    """
    own = run_dir(config)
    if parallel.is_main:
        put_back(own / "checkpoints")
    dist.barrier()
    resume_from = arguments.resume_from
    restarted = is_restart(own)
    if restarted:
        arguments = dataclasses.replace(arguments, resume_from=None, no_resume=False, resume_after_stop=False)
        if on_main(lambda: bool(resume_candidates(own / "checkpoints"))):
            resume_from = None
    refuse_same_spike(own, config, arguments, parallel)
    if arguments.no_resume:
        return Start()
    checksums = config.checkpoint.verify == "full"
    damaged: list[tuple[str, str]] = []
    checkpoint: Path | None
    if resume_from:
        checkpoint = named_checkpoint(f"--resume-from {resume_from}", Path(resume_from))
        fault = find_damage(checkpoint, parallel, checksums, tensors_later=tensors_later)
        if fault is not None:
            raise _refused_by_name(checkpoint, fault)
    else:
        checkpoint, damaged = _newest_intact(own, parallel, checksums, tensors_later=tensors_later)
    if checkpoint is None:
        return Start(same_job=restarted)
    start = start_from(checkpoint, config, ranges, damaged)
    start = dataclasses.replace(start, unchecked=checksums and tensors_later, by_name=resume_from is not None)
    if not start.same_run and (own / "checkpoints").resolve() in checkpoint.resolve().parents:
        raise ResumeError(
            f"--resume-from {resume_from}: lies in {own / 'checkpoints'}, which moves to previous/ when the run starts "
            "from elsewhere. Copy it to another folder, or give another run.name."
        )
    return start


def choose_again(
    start: Start, fault: str, config: Config, ranges: list[PhaseRange], parallel: Parallel
) -> Start:
    """Choose another start after the checkpoint of `start` was found damaged while it was read. Collective.

    Raises:
        ResumeError: --resume-from names the damaged checkpoint, or no other checkpoint is intact.
    """
    assert start.checkpoint is not None
    if start.by_name:
        raise _refused_by_name(start.checkpoint, fault)
    known = [*start.damaged, (start.checkpoint.name, fault)]
    checkpoint, damaged = _newest_intact(run_dir(config), parallel, True, known)
    assert checkpoint is not None  # without an intact checkpoint, `_newest_intact` raises
    return start_from(checkpoint, config, ranges, damaged)


def _refused_by_name(checkpoint: Path, fault: str) -> ResumeError:
    return ResumeError(f"--resume-from: {checkpoint} is damaged: {fault}. Give another checkpoint.")


def start_from(
    checkpoint: Path, config: Config, ranges: list[PhaseRange], damaged: Sequence[tuple[str, str]]
) -> Start:
    """Returns the start from a checkpoint.

    Args:
        damaged: (name, fault) of newer checkpoints that were skipped.

    Raises:
        ResumeError: the checkpoint has another model or other phases.
    """
    try:
        state = read_run_state(checkpoint)
    except ValueError as error:
        raise ResumeError(str(error)) from error
    if "optimizer" not in read_common(checkpoint):  # from launch/average_weights.py
        raise ResumeError(
            f"{checkpoint} has weights alone; start a new run with checkpoint.initial_weights={checkpoint}"
        )
    _check_same_model(config, state, checkpoint)
    _check_same_phases(config.train, state, ranges, checkpoint)
    stays = _stays(state, ranges)
    # Links are resolved, because the run folder or a checkpoint may be a link, for example to a larger disk.
    own = run_dir(config) / "checkpoints"
    if checkpoint.resolve().parent == own.resolve():
        checkpoint = own / checkpoint.resolve().name
    return Start(
        checkpoint=checkpoint,
        state=state,
        phase_index=state.phase_index if stays else state.phase_index + 1,
        inside_phase=stays or ranges[state.phase_index + 1].phase.keep_optimizer,
        same_run=checkpoint.parent.resolve() == own.resolve(),
        damaged=tuple(damaged),
    )


def named_checkpoint(option: str, folder: Path) -> Path:
    """Returns the checkpoint that rank 0 finds in a user's folder. Other ranks may see a newer checkpoint. Collective.

    Raises:
        ResumeError: the folder has no complete checkpoint. Raised on all ranks.
    """

    def find() -> Path:
        try:
            checkpoint = find_checkpoint(folder)
        except OSError as error:
            raise ResumeError(f"{option}: {error}") from error
        if checkpoint is None:
            raise ResumeError(
                f"{option}: no complete checkpoint there; give a step_* folder, or a run folder"
            )
        return checkpoint

    return on_main(find, ResumeError)


def _newest_intact(
    own: Path,
    parallel: Parallel,
    checksums: bool,
    known: Sequence[tuple[str, str]] = (),
    tensors_later: bool = False,
) -> tuple[Path | None, list[tuple[str, str]]]:
    """Returns the newest intact checkpoint of a run folder, and (name, fault) of newer damaged ones. Collective.

    Args:
        known: (name, fault) of checkpoints already found damaged, newest first.

    Raises:
        ResumeError: all checkpoints are damaged; a start at step 0 then requires --no-resume.
    """
    checkpoints, damaged = own / "checkpoints", list(known)
    run_id = run_id_of(own) if parallel.is_main else ""
    names = [name for name, _ in known]
    for candidate in on_main(lambda: resume_candidates(checkpoints)):
        if candidate.name not in names:
            fault = find_damage(candidate, parallel, checksums, run_id, tensors_later)
            if fault is None:
                return candidate, damaged
            damaged.append((candidate.name, fault))
    if damaged:
        raise ResumeError(
            f"{checkpoints} has no intact checkpoint to resume from:\n"
            + "\n".join(f"  {name}: {fault}" for name, fault in damaged)
            + f"\nRepair one of them, name another in {checkpoints / 'latest'}, or start again at step 0 with "
            "--no-resume (which keeps all of this in previous/)."
        )
    return None, []


def set_damaged_aside(chosen: Path, damaged: Sequence[tuple[str, str]]) -> None:
    """Rename the damaged checkpoints, and point `latest` to the chosen checkpoint, which the next start then uses.
    Call this on the main rank."""
    if not damaged:
        return
    renamed = pass_over([chosen.with_name(name) for name, _ in damaged], chosen)
    for name, fault in damaged:
        logger.warning("checkpoint %s is damaged: %s", name, fault)
    kept = f"; kept as {', '.join(path.name for path in renamed)}" if renamed else ""
    logger.warning("going back to the newest intact checkpoint, %s%s", chosen.name, kept)


def open_batches(
    config: Config,
    arguments: Arguments,
    start: Start,
    tokenizer: Tokenizer,
    parallel: Parallel,
    begins_at: dict[str, Any] | None = None,
) -> TrainBatches:
    """Open the training text at the run's position. Collective.

    --accept-new-data applies if the checkpoint was trained on other text (shards, text_field) or in another order
    (seed, num_lanes, shuffle_documents). In this case, the run reads the config's text from its beginning, at epoch 0,
    and keeps the checkpoint's step, schedule, optimizer and counters. If text and order are unchanged, the option has
    no effect. A job that restarts itself may therefore keep the option.

    Args:
        begins_at: another run's position in the text, at which a run at step 0 starts (`checkpoint.initial_text`,
            `initial_state`).

    Raises:
        ResumeError: the checkpoint's position belongs to other text or another tokenizer.
        DataFault: the text cannot be opened.
    """
    position = start.state.data if start.state else begins_at
    accepts = begins_at is None and arguments.accept_new_data
    try:
        return TrainBatches(config, parallel, tokenizer, position, accepts)
    except StateMismatch as error:
        if begins_at is not None:
            field = "initial_text" if config.checkpoint.initial_state == "fresh" else "initial_state"
            raise ResumeError(
                f"checkpoint.{field} = continue: {config.checkpoint.initial_weights} cannot go on with this "
                f"data:\n{error}\nTo begin with the beginning of the config's text, set checkpoint.{field}=fresh."
            ) from error
        remedy = (
            "\nTo go on at this step from the beginning of the config's text, add --accept-new-data."
            if error.other_data and not arguments.accept_new_data
            else ""
        )
        raise ResumeError(f"{start.checkpoint} cannot go on with this data:\n{error}{remedy}") from error


MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "model": (),
    "gsa": ("attention_impl", "attention_kernel", "dense_attention", "indexer_loss_row_fraction"),
    "moe": ("balance_coeff", "bias_update_rate", "z_loss_coeff", "experts_impl"),
}
"""Fields that may change, because they select implementations, sample the indexer loss, or weight the router
balancing."""


def _check_same_model(config: Config, state: RunState, checkpoint: Path) -> None:
    """Raise ResumeError if a field differs that changes the weights or their use."""
    saved = saved_sections(state.config_yaml)
    names = {
        section: [name for name in vars(getattr(config, section)) if name not in may_change]
        for section, may_change in MAY_CHANGE.items()
    }
    lines = [f"  {line}" for line in other_fields(config, state, names)]
    for field, values in REMOVED.items():
        section, name = field.split(".")
        if section not in MAY_CHANGE:
            continue
        before = saved.get(section, {}).get(name, values[0])
        if before not in values:
            lines.append(f"  {field} = {before} in the checkpoint: {WHY_REMOVED}")
    if lines:
        raise ResumeError(
            f"{checkpoint} holds another model:\n" + "\n".join(lines) + "\nSet these fields as they were, or "
            "start a new run (another run.name, or --no-resume)."
        )


def other_fields(config: Config, state: RunState, fields: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns a line for each of `fields` (names by section) that differs from the checkpoint's config. A field that
    the checkpoint lacks is newer than the checkpoint, and had today's default value."""
    saved, lines = saved_sections(state.config_yaml), []
    for section, names in fields.items():
        part = getattr(config, section)
        now, younger = dataclasses.asdict(part), dataclasses.asdict(type(part)())
        for name in names:
            before = saved.get(section, {}).get(name, younger[name])
            if before != now[name]:
                lines.append(f"{section}.{name} = {now[name]} here, {before} in the checkpoint")
    return lines


def _stays(state: RunState, ranges: list[PhaseRange]) -> bool:
    """Returns whether a start from this state begins in the checkpoint's phase, not in the next one."""
    is_last = state.phase_index == len(ranges) - 1
    return is_last or state.validation_due or state.tasks_due or state.step != ranges[state.phase_index].end


def _check_same_phases(
    train: TrainConfig, state: RunState, ranges: list[PhaseRange], checkpoint: Path
) -> None:
    remedy = (
        "Keep the phases up to this one as they were, or start a new run (another run.name, or --no-resume)."
    )
    if state.phase_index >= len(ranges):
        raise ResumeError(
            f"{checkpoint} was written in phase {state.phase_index} ({state.phase_name}), but the config has "
            f"{len(ranges)} phases. {remedy}"
        )
    phase_range = ranges[state.phase_index]
    phase = phase_range.phase
    if phase.name != state.phase_name or phase_range.start != state.phase_start:
        raise ResumeError(
            f"{checkpoint} was written in phase {state.phase_name}, which began at step {state.phase_start}; "
            f"in the config phase {state.phase_index} is {phase.name} and begins at step {phase_range.start}. "
            f"{remedy}"
        )
    saved = saved_sections(state.config_yaml)
    trained = saved["phases"][state.phase_index]["train"]
    optimizer = saved.get("train", {}).get("optimizer", TrainConfig.optimizer)
    loads = _stays(state, ranges) or ranges[state.phase_index + 1].phase.keep_optimizer
    if optimizer != train.optimizer and loads:
        raise ResumeError(
            f"{checkpoint} holds the state of train.optimizer = {optimizer}; the config has {train.optimizer}. Set it "
            "as it was until the phase ends, or start a new run with checkpoint.initial_weights set to this checkpoint."
        )
    if trained != phase.train:
        raise ResumeError(
            f"{checkpoint} was written while phase {state.phase_name} trained {trained}; in the config "
            f"phases.{state.phase_index}.train = {phase.train}, which its optimizer does not fit. {remedy}"
        )
    if state.step > phase_range.end:
        raise ResumeError(
            f"{checkpoint} stands at step {state.step}, but phase {phase.name} now ends at {phase_range.end}. "
            f"{remedy}"
        )
