"""Rewind a run to an earlier checkpoint and skip the batches around a spike.

The checkpoints folder records the skipped steps for a restart. Every later checkpoint records them, too, for runs that
continue from a copy of the checkpoint. A rewind equals a restart from the checkpoint with `train.iterations_to_skip`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gsa_train.checkpoint.files import go_back_to, resume_candidates, step_of
from gsa_train.config import Config
from gsa_train.distributed.parallel import Parallel
from gsa_train.files import read_checked, write_checked
from gsa_train.reliability.monitor.monitor import MonitorState, MonitorStop, SpikeFound
from gsa_train.run_folder.resume import Start, first_intact, set_damaged_aside

FILE = "rewinds.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewind:
    """Describes one rewind. Steps are counted from 1."""

    checkpoint_step: int
    """Step of the checkpoint that was reloaded."""
    spike_step: int
    """First step of the spike."""
    first_skipped: int
    last_skipped: int
    """The batches of steps `first_skipped` to `last_skipped` are read and skipped."""
    spikes: int
    """Number of the run's spikes at the rewind. The checkpoint has counted fewer."""


def with_rewinds(state: MonitorState, rewinds: Sequence[dict[str, Any]]) -> MonitorState:
    """Returns a checkpoint's monitor state with the rewinds, and with the spikes that were counted after the
    checkpoint."""
    spikes = max([state.spikes, *(each["spikes"] for each in rewinds)])
    return replace(state, rewinds=list(rewinds), spikes=spikes)


def skipped_steps(config: Config, rewinds: Sequence[dict[str, Any]]) -> frozenset[int]:
    """Returns the steps whose batches are skipped, by `train.iterations_to_skip` or by rewinds."""
    ranges = [range(each["first_skipped"], each["last_skipped"] + 1) for each in rewinds]
    return frozenset(config.train.iterations_to_skip).union(*ranges)


def rewind(
    found: SpikeFound,
    checkpoints: Path,
    rewinds: Sequence[dict[str, Any]],
    config: Config,
    parallel: Parallel,
    last_step: int,
    known: Sequence[tuple[str, str]] = (),
) -> tuple[Path, Rewind, list[tuple[str, str]]]:
    """Set `latest` to the newest intact checkpoint that is old enough, and record the steps to skip. Collective.

    Newer checkpoints move to `checkpoints/set_aside`. No save may be in progress.

    Args:
        known: (name, fault) of checkpoints already found damaged, newest first.

    Returns:
        The checkpoint, the rewind, and (name, fault) of damaged checkpoints that are newer and old enough.

    Raises:
        MonitorStop: `monitor.max_rewinds` rewinds are done, or no intact checkpoint is old enough.
    """
    monitor = config.monitor
    spike = f"step {found.first_step}: a spike ({found.signal.replace('_', ' ')} {found.value:g})"
    if len(rewinds) >= monitor.max_rewinds:
        raise MonitorStop(
            f"{spike} after {len(rewinds)} rewinds (monitor.max_rewinds); nothing of it was saved",
            found.first_step,
            found.last_step,
        )
    newest = found.first_step - monitor.rewind_min_steps
    shared: list[Any] = [resume_candidates(checkpoints) if parallel.is_main else None]
    dist.broadcast_object_list(shared, src=0)
    names = [name for name, _ in known]
    fitting = [
        path
        for path in shared[0]
        if (step := step_of(path.name)) is not None and step <= newest and path.name not in names
    ]
    checkpoint, found_damaged = first_intact(fitting, parallel, config.checkpoint.verify == "full")
    damaged = [*known, *found_damaged]
    if checkpoint is None:
        faults = "".join(f"; {name} is damaged: {fault}" for name, fault in damaged)
        raise MonitorStop(
            f"{spike}: no checkpoint of step {newest} or before to go back to (monitor.rewind_min_steps = "
            f"{monitor.rewind_min_steps}{faults}); save more often (checkpoint.every_steps) or keep more "
            "(checkpoint.keep_last)",
            found.first_step,
            found.last_step,
        )
    step = step_of(checkpoint.name)
    assert step is not None
    done = Rewind(
        checkpoint_step=step,
        spike_step=found.first_step,
        first_skipped=max(step + 1, found.first_step - monitor.rewind_skip_before_steps),
        last_skipped=min(last_step, found.last_step + monitor.rewind_skip_after_steps),
        spikes=found.spikes,
    )
    if parallel.is_main:
        set_damaged_aside(checkpoint, damaged)
        # The order matters: a run that is killed in between restarts from this checkpoint and meets the same spike
        # again.
        go_back_to(checkpoint)
        write_checked(checkpoints / FILE, {"rewinds": [*rewinds, asdict(done)]})
    dist.barrier()
    return checkpoint, done, damaged


def known_rewinds(checkpoints: Path, start: Start, parallel: Parallel) -> list[dict[str, Any]]:
    """Returns the run's earlier rewinds in order, from the run's folder or else from the checkpoint. Collective."""
    shared: list[list[dict[str, Any]]] = [start.monitor.rewinds]
    path = checkpoints / FILE
    if parallel.is_main and start.same_run and path.exists():
        try:
            shared = [_read_rewinds(path)]
        except (ValueError, TypeError) as error:
            logger.warning(
                "%s is damaged (%s): the checkpoint's %d rewinds count, and a spike after it is found again",
                path,
                error,
                len(shared[0]),
            )
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _read_rewinds(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError or TypeError for a damaged file."""
    return [asdict(Rewind(**each)) for each in read_checked(path, ["rewinds"])["rewinds"]]
