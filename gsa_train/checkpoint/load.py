"""Define the content of a checkpoint and load it, in megatron-core's sharded format.

A checkpoint holds the model, the phase's optimizer, and all other state that a run needs to continue (`RunState`). A
checkpoint loads into any layout.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # noqa: F401 - without it megatron-core's writer fails each save; better to fail at the start
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.models.gpt import GPTModel

from gsa_train.checkpoint.files import FileRecord, faults_in_a_line
from gsa_train.checkpoint.guarded import RefusedContent, read_common
from gsa_train.checkpoint.optimizer_state import (
    SAVED_MAIN_WEIGHT,
    Saved,
    from_main_weights,
    has_state,
    names_of_others,
    parts_with_main_weights,
    saved_state,
    wanted_state,
)
from gsa_train.checkpoint.parallel_read import ReadLog, faults_of_read, noting
from gsa_train.checkpoint.shared_read import WithExperts
from gsa_train.distributed.megatron_versions import load_sharded
from gsa_train.distributed.objects import gathered
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.build import WEIGHT_AVERAGE
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer

FORMAT_VERSION = 4

logger = logging.getLogger(__name__)


class DamagedCheckpoint(Exception):
    """A read found the checkpoint damaged, on all ranks. The tensors that were being filled are undefined."""


class StateError(ValueError):
    """The optimizer state of a checkpoint does not match its weights."""


@dataclass(frozen=True)
class RunState:
    """The state of a run, apart from weights and optimizer."""

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
    layout: tuple[int, int, int, int]
    """`Parallel.layout`"""
    rng: list[dict[str, Any]]
    """Random-number generators of every rank, restored when the layout is the same."""
    validation_due: bool = False
    """The validation of this step was interrupted by a stop. A restart repeats the validation first."""
    tasks_due: bool = False
    """The tasks of this step are not scored yet. A restart scores them first."""
    task_clock: dict[str, Any] = field(default_factory=dict)
    """gsa_train.validation.tasks.TaskClock"""
    monitor: dict[str, Any] = field(default_factory=dict)
    """gsa_train.reliability.monitor.monitor.MonitorState"""
    run: str = ""
    """`run.name`"""
    run_id: str = ""
    """gsa_train.run_folder.starts.new_run_id"""
    format_version: int = FORMAT_VERSION


# --- load ------------------------------------------------------------------------------------------------


def read_run_state(checkpoint: Path) -> RunState:
    """Read the state that is needed before model and optimizer are built: phase, step, position in the text.

    Raises:
        ValueError: the checkpoint is damaged or has another format version.
    """
    try:
        content = read_common(checkpoint)["run"]
    except RefusedContent as error:
        raise RefusedContent(f"{checkpoint}: {error}. Give another checkpoint.") from error
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{checkpoint} has format version {content['format_version']}, this code reads {FORMAT_VERSION}; "
            "use the version of gsa_train that wrote it"
        )
    return RunState(**{**content, "layout": tuple(content["layout"])})


def load_checkpoint(
    checkpoint: Path,
    model: Model,
    phase_optimizer: PhaseOptimizer,
    parallel: Parallel,
    with_optimizer: bool,
    unchecked: Mapping[str, FileRecord] | None = None,
) -> None:
    """Fill the model and, within the checkpoint's phase, the optimizer. Collective.

    Args:
        with_optimizer: True within the checkpoint's phase: load the whole optimizer. The config's
            parallel.distributed_optimizer, parallel.strategy, train.precision and learning-rate multipliers may differ
            from the checkpoint's. False at the start of the next phase: load only fp32 weights that both phases train.
            Moments start fresh.
        unchecked: files with tensors to check while they are read; None if they were checked.

    Raises:
        DamagedCheckpoint: the files are not what was written.
        NotRead: the files are intact, but a rank could not load them.
        StateError: the fp32 weights in the optimizer's state are not the model's weights.
    """
    log = None if unchecked is None else ReadLog(checkpoint)
    with noting(log):
        others = _fill(checkpoint, model, phase_optimizer, parallel, weights=True, moments=with_optimizer)
    if log is not None and unchecked is not None:
        fault = faults_in_a_line(faults_of_read(log, unchecked, parallel))
        if fault is not None:
            raise DamagedCheckpoint(fault)
    if others:
        raise StateError(
            f"{checkpoint}: the optimizer's fp32 weights of {faults_in_a_line(others, ', ')} differ from the model's. "
            "The model's weights are good, the optimizer's state is not: start a new run (another run.name) with "
            f"checkpoint.initial_weights={checkpoint}, at step 0 of its config and with fresh moments."
        )
    if with_optimizer:
        phase_optimizer.set_updates(read_common(checkpoint)["optimizer"]["common_step"])


def load_main_weights(
    checkpoint: Path, model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel
) -> list[str]:
    """Load the checkpoint's separate fp32 weights into the optimizer, or into an fp32 model. Collective.

    Call this after `load_weights` has filled the model.

    Returns:
        Parameters whose fp32 weights differ from the model's weights. If there are any, the optimizer starts from the
        model's weights.
    """
    others = _fill(checkpoint, model, phase_optimizer, parallel, weights=False, moments=False)
    if others:
        with phase_optimizer.whole_weights(changes=True):
            load_weights(checkpoint, model, parallel, names=saved_weights(checkpoint).keys())
        phase_optimizer.start_from_weights()
    return others


def _fill(
    checkpoint: Path,
    model: Model,
    phase_optimizer: PhaseOptimizer,
    parallel: Parallel,
    weights: bool,
    moments: bool,
) -> list[str]:
    """Fill model and optimizer. fp32 weights come from the checkpoint if it has them. Collective.

    Args:
        weights: also fill the model; otherwise it has the checkpoint's weights already.

    Returns:
        Parameters whose fp32 weights differ from the model's weights on some rank.
    """
    metadata = _loading_metadata(checkpoint, parallel)
    saved = _saved_tensors(checkpoint)
    with phase_optimizer.whole_weights(changes=True):
        entries = sharded_state(model, None, metadata)
        # Derive everything from the entries before a load takes them apart.
        wanted = wanted_state(phase_optimizer, dict(entries), saved, moments)
        parts = parts_with_main_weights(phase_optimizer, dict(entries), saved)
        from_mains = from_main_weights(entries, saved)
        names_of_mains = [entries[chunk][name].key for chunk, state in from_mains.items() for name in state]
        if weights:
            _load(checkpoint, model, entries)
        before = [part.weight() for _, part in parts]
        mine = []
        if has_state(saved, SAVED_MAIN_WEIGHT) and not model.mcore_config.bf16:
            # In fp32 the optimizer has no separate weights. Fill the model from the fp32 weights of a bf16 run,
            # including parameters that the phase does not train.
            parameters = [entry.data for state in from_mains.values() for entry in state.values()]
            rounded = [parameter.detach().clone() for parameter in parameters]
            _load(checkpoint, model, from_mains, all_weights=False)
            mine = names_of_others(names_of_mains, parameters, rounded, saved)
    phase_optimizer.start_from_weights()
    targets = {name: box.data for name, box in wanted.items()}
    # If a rank loads nothing, the result has no key "state".
    shared = phase_optimizer.state_group is None
    for name, tensor in _read(checkpoint, {"state": wanted}, model, shared).get("state", {}).items():
        targets[name].copy_(tensor)  # mostly a copy onto itself
    if moments and not has_state(saved, WEIGHT_AVERAGE):
        phase_optimizer.start_average()
    mains = [part.tensors[MAIN_WEIGHT] for _, part in parts]
    mine += names_of_others([name for name, _ in parts], mains, before, saved)
    return sorted({name for each in gathered(mine) for name in each})


def load_weights(checkpoint: Path, model: Model, parallel: Parallel, names: Set[str] | None = None) -> None:
    """Fill a model that has no optimizer yet. Collective.

    Args:
        names: names on disk of the tensors to load; the other tensors stay unchanged. None: all.
    """
    wanted = sharded_state(model, None, _loading_metadata(checkpoint, parallel))
    if names is not None:
        wanted = {
            chunk: {name: tensor for name, tensor in state.items() if tensor.key in names}
            for chunk, state in wanted.items()
        }
    _load(checkpoint, model, wanted, all_weights=names is None)


def saved_weights(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Returns a dict from names on disk to shapes of whole tensors, without the optimizer state."""
    return {
        name: tuple(tensor.global_shape)
        for name, tensor in _saved_tensors(checkpoint).items()
        if not name.startswith("optimizer.")
    }


def _saved_tensors(checkpoint: Path) -> Saved:
    found: Saved = dist_checkpointing.load_tensors_metadata(str(checkpoint), TorchDistLoadShardedStrategy())
    return found


def weights_to_load(checkpoint: Path, model: Model, parallel: Parallel) -> dict[str, tuple[int, ...]]:
    """Returns a dict from names on disk to shapes, for the weights of the whole model on all ranks. Collective."""
    chunks = sharded_state(model, None, _loading_metadata(checkpoint, parallel))
    apply_factories(chunks)  # the two halves of a SwiGLU layer's first product
    tensors = (each for each in nested_values(chunks) if isinstance(each, ShardedTensor))
    mine = {tensor.key: tuple(tensor.global_shape) for tensor in tensors}
    return {name: shape for each in gathered(mine) for name, shape in each.items()}


def _loading_metadata(checkpoint: Path, parallel: Parallel) -> dict[str, Any]:
    metadata: dict[str, Any] = read_common(checkpoint)["content_metadata"]
    return {**metadata, "dp_cp_group": parallel.groups.dp_cp}


def _load(checkpoint: Path, model: Model, wanted: dict[str, Any], all_weights: bool = True) -> None:
    content = _read(checkpoint, wanted, model)
    for name, chunk in _named_chunks(model).items():
        # A rank whose weights are all unwanted has nothing to load.
        chunk.load_state_dict(content[name] if all_weights else content.get(name, {}), strict=all_weights)


def _read(checkpoint: Path, wanted: dict[str, Any], model: Model, shared: bool = True) -> dict[str, Any]:
    """
    Args:
        shared: whether replicas want equal tensors. Each replica then reads a part for all replicas.
    """
    strategy, groups = TorchDistLoadShardedStrategy(), model.parallel.groups
    if shared and model.mcore_config.moe.experts > 0:  # the same on all ranks
        strategy = WithExperts(strategy, groups)
    elif shared:
        strategy = FullyParallelLoadStrategyWrapper(strategy, groups.dp_cp)
    return load_sharded(wanted, checkpoint, strategy, read_common)


def sharded_state(
    model: Model, phase_optimizer: PhaseOptimizer | None, metadata: dict[str, Any]
) -> dict[str, Any]:
    state = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(model).items()
    }
    if phase_optimizer is not None:
        state["optimizer"] = {
            "state": saved_state(phase_optimizer, dict(state)),
            "common_step": float(phase_optimizer.updates),
        }
    return state


def _named_chunks(model: Model) -> dict[str, GPTModel]:
    """Returns the chunks under megatron-core's names. Tensors on disk have names that number layers over the whole
    model."""
    if len(model.chunks) == 1:
        return {"model": model.gpt}
    return {f"model{number}": chunk for number, chunk in enumerate(model.chunks)}


def sharding_metadata(parallel: Parallel) -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,  # layers that reuse a selection have no indexer
        "dp_cp_group": parallel.groups.dp_cp,
    }


# --- random numbers --------------------------------------------------------------------------------------


def local_rng() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_local_rng(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(saved["tracker"])
