"""Checkpoints: megatron-core's sharded format, in a folder that is either complete or not there.

    <run folder>/checkpoints/step_00000200/     one checkpoint, with the run's config.yaml
    <run folder>/checkpoints/latest             the name of the newest one; replaced last, atomically
    <run folder>/checkpoints/set_aside/         what was newer than the checkpoint that a rewind went back to

A checkpoint holds the model, the phase's optimizer, and `RunState`: everything else a run needs to go on as if it
had never stopped. It loads into any layout.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # noqa: F401 - without it megatron-core's writer process dies and the save waits forever
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from gsa_train.model.build import Model
from gsa_train.optim import PhaseOptimizer, unshare_step_counts
from gsa_train.parallel import Parallel

FORMAT_VERSION = 1
LATEST = "latest"
SET_ASIDE = "set_aside"
"""Folder of the checkpoints that a rewind left behind."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands, apart from weights and optimizer."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on."""
    phase_index: int
    phase_name: str
    phase_start: int
    """First step of the phase."""
    data: dict[str, Any]
    """Position in the text (gsa_data.stream)."""
    wandb_run_id: str | None
    config_yaml: str
    layout: tuple[int, int, int]
    """Tensor, pipeline and data-parallel sizes."""
    rng: list[dict[str, Any]]
    """Random-number generators of every rank, restored when the layout is the same."""
    monitor: dict[str, Any] = field(default_factory=dict)
    """gsa_train.monitor.MonitorState; empty in checkpoints from before there was one."""
    format_version: int = FORMAT_VERSION


# --- which checkpoint ------------------------------------------------------------------------------------


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def find_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `folder` means: itself, or what `latest` names in it or in its `checkpoints`.

    None when there is none.

    Raises:
        FileNotFoundError: `latest` names a checkpoint that is missing or incomplete.
    """
    if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        return folder
    for checkpoints in (folder, folder / "checkpoints"):
        pointer = checkpoints / LATEST
        if not pointer.is_file():
            continue
        named = checkpoints / pointer.read_text().strip()
        if dist_checkpointing.check_is_distributed_checkpoint(str(named)):
            return named
        complete = [path.name for path in complete_checkpoints(checkpoints)]
        raise FileNotFoundError(
            f"{pointer} names {named.name}, which is missing or incomplete; complete checkpoints: "
            f"{', '.join(complete) or 'none'}. Write one of these names into {pointer} to resume from it."
        )
    return None


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in checkpoints.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return [
        path
        for path in sorted(found, key=step_of)
        if dist_checkpointing.check_is_distributed_checkpoint(str(path))
    ]


def recover_folder(checkpoints: Path) -> None:
    """Undo what a killed save left behind. Call on one rank before anything is read."""
    for replaced in checkpoints.glob(".replaced_step_*"):
        original = checkpoints / replaced.name.removeprefix(".replaced_")
        if original.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(original)
    for unfinished in checkpoints.glob(".tmp_step_*"):
        shutil.rmtree(unfinished)


# --- save ------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoints: Path,
    state: RunState,
    model: Model,
    phase_optimizer: PhaseOptimizer,
    parallel: Parallel,
    keep_last: int,
) -> Path:
    """Write a checkpoint, then move `latest` to it, then delete all but the newest `keep_last`. Collective."""
    final = step_folder(checkpoints, state.step)
    unfinished = checkpoints / f".tmp_{final.name}"
    if parallel.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    if phase_optimizer.ddp.use_forward_hook:
        phase_optimizer.ddp.disable_forward_pre_hook()  # parameters under way must arrive first
        phase_optimizer.ddp.enable_forward_pre_hook()
    metadata = _sharding_metadata(parallel)
    content = {
        **_sharded_state(model, phase_optimizer, metadata, is_loading=False),
        "run": {each.name: getattr(state, each.name) for each in fields(state)},
    }
    dist_checkpointing.save(
        content,
        str(unfinished),
        FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), parallel.groups.dp_cp),
        content_metadata={key: value for key, value in metadata.items() if key != "dp_cp_group"},
    )
    if parallel.is_main:
        (unfinished / "config.yaml").write_text(state.config_yaml)
        _make_durable(unfinished)
        _publish(unfinished, final)
        for old in complete_checkpoints(checkpoints)[:-keep_last]:
            if old != final:
                shutil.rmtree(old)
    dist.barrier()
    return final


def _publish(unfinished: Path, final: Path) -> None:
    replaced = final.with_name(f".replaced_{final.name}")
    if final.exists():  # the run went back to an earlier checkpoint and came here again
        final.rename(replaced)
    unfinished.rename(final)
    _sync(final.parent)
    _point_to(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _point_to(final: Path) -> None:
    """`latest` names this checkpoint from now on."""
    pointer = final.parent / f".{LATEST}.tmp"
    pointer.write_text(final.name)
    _sync(pointer)
    os.replace(pointer, final.parent / LATEST)
    _sync(final.parent)


def go_back_to(checkpoint: Path) -> None:
    """Make an earlier checkpoint the latest one; newer ones move to `set_aside/`. Call on one rank."""
    _point_to(checkpoint)
    aside = checkpoint.parent / SET_ASIDE
    for newer in complete_checkpoints(checkpoint.parent):
        if step_of(newer) > step_of(checkpoint):
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / newer.name, ignore_errors=True)
            newer.rename(aside / newer.name)


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- load ------------------------------------------------------------------------------------------------


def read_run_state(checkpoint: Path) -> RunState:
    """What must be known before model and optimizer are built: the phase, the step, the position in the text.

    Raises:
        ValueError: the checkpoint has another format version.
    """
    content = dist_checkpointing.load_common_state_dict(str(checkpoint))["run"]
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{checkpoint} has format version {content['format_version']}, this code reads {FORMAT_VERSION}; "
            "use the version of gsa_train that wrote it"
        )
    return RunState(**content)


def load_checkpoint(
    checkpoint: Path, model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel, with_optimizer: bool
) -> None:
    """Fill the model and, within the checkpoint's phase, the optimizer. Collective.

    Args:
        with_optimizer: False at the start of the phase after the checkpoint's: its optimizer starts fresh.
    """
    content = _load(checkpoint, model, phase_optimizer if with_optimizer else None, parallel)
    if with_optimizer:
        phase_optimizer.optimizer.load_state_dict(content["optimizer"])
        unshare_step_counts(phase_optimizer.optimizer)
    else:
        phase_optimizer.optimizer.reload_model_params()


def load_weights(checkpoint: Path, model: Model, parallel: Parallel) -> None:
    """Fill a model that will not be trained. Collective."""
    _load(checkpoint, model, None, parallel)


def _load(
    checkpoint: Path, model: Model, phase_optimizer: PhaseOptimizer | None, parallel: Parallel
) -> dict[str, Any]:
    metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
    metadata["dp_cp_group"] = parallel.groups.dp_cp
    wanted = _sharded_state(model, phase_optimizer, metadata, is_loading=True)
    content: dict[str, Any] = dist_checkpointing.load(
        wanted,
        str(checkpoint),
        FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(checkpoint)), parallel.groups.dp_cp
        ),
        strict=dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED,
    )
    model.gpt.load_state_dict(content["model"])
    return content


def _sharded_state(
    model: Model, phase_optimizer: PhaseOptimizer | None, metadata: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    state = {"model": model.gpt.sharded_state_dict(metadata=metadata)}
    if phase_optimizer is not None:
        state["optimizer"] = phase_optimizer.optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=metadata
        )
    return state


def _sharding_metadata(parallel: Parallel) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",  # tensor and pipeline sizes may change, too
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,  # layers that reuse a selection have no indexer
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel.groups.dp_cp,
    }


# --- random numbers --------------------------------------------------------------------------------------


def gather_rng(parallel: Parallel) -> list[dict[str, Any]]:
    """The generators of every rank, by rank. Collective."""
    local = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    gathered: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(gathered, local)
    return gathered


def restore_rng(state: RunState, layout: Sequence[int], rank: int) -> bool:
    """Restore this rank's generators if the layout is the one that was saved; says whether it did."""
    if tuple(state.layout) != tuple(layout):
        return False
    saved = state.rng[rank]
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(saved["tracker"])
    return True
