"""Optimizer state in a checkpoint, parameter by parameter: what one kind of optimizer loads from another's checkpoint.

megatron-core loads its plain and its distributed optimizer each only into itself, but both save the moments by the
names of the parameters, and so does zero.py. Here every parameter's state is loaded whole (in its tensor-parallel
shape), and the optimizer puts it where it keeps it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from gsa_train.config import PhaseConfig
from gsa_train.optim import lr_multipliers
from gsa_train.phase_optimizer import PhaseOptimizer

PREFIX = "optimizer.state"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN_WEIGHTS = ("param", "fp32_param")
"""Names of the fp32 weights; a plain optimizer of fp32 weights saves no copy of them."""

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


def saved_format(parallel: dict[str, Any], saved_keys: set[str]) -> str:
    """`PhaseOptimizer.state_format` of a checkpoint.

    Args:
        parallel: this section of its config.
        saved_keys: names of its tensors.
    """
    if parallel.get("strategy") == "deepspeed":
        return "zero"
    if parallel["distributed_optimizer"]:
        return "distributed"
    has_weights = any(key.startswith(f"{PREFIX}.{MAIN_WEIGHTS[1]}.") for key in saved_keys)
    return "plain_bf16" if has_weights else "plain"


def saved_multipliers(phase: dict[str, Any]) -> dict[str, float]:
    """`lr_multipliers` of a phase in a checkpoint's config; a field that it does not know stood at its default."""
    names = {field.name for field in fields(PhaseConfig)}
    return lr_multipliers(PhaseConfig(**{name: value for name, value in phase.items() if name in names}))


def by_parameter(model_state: dict[str, Any]) -> dict[int, Sharded]:
    """id of a parameter -> its entry in the model's sharded state dict."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(each.data): each for each in nested_values(sharded)}


def wanted_state(
    phase_optimizer: PhaseOptimizer, model_state: dict[str, Any], saved_keys: set[str]
) -> dict[str, dict[str, Any]]:
    """Name of each parameter that this rank loads -> its sharded fp32 weight and moments.

    Args:
        model_state: the model's sharded state dict.
        saved_keys: names of the tensors in the checkpoint.

    Raises:
        KeyError: the checkpoint lacks the state of a parameter.
    """
    entries = by_parameter(model_state)
    wanted = {}
    for name, parameter in phase_optimizer.loaded_parameters():
        like = entries[id(parameter)]
        if phase_optimizer.state_format == "zero":
            like = only_copy(like)  # no other replica loads it
        keys = {moment: f"{PREFIX}.{moment}.{like.key}" for moment in MOMENTS}
        for kind in MAIN_WEIGHTS:
            if f"{PREFIX}.{kind}.{like.key}" in saved_keys:
                keys["param"] = f"{PREFIX}.{kind}.{like.key}"
        missing = [key for key in keys.values() if key not in saved_keys]
        if missing:
            raise KeyError(f"the checkpoint has no {', '.join(missing)}")
        wanted[name] = {kind: fp32_like(like, key, _empty(like)) for kind, key in keys.items()}
    return wanted


def wanted_weights(phase_optimizer: PhaseOptimizer, model_state: dict[str, Any]) -> dict[str, Sharded]:
    """Name of each parameter that this rank loads -> the model's weight, to be loaded in fp32 whatever the model's
    precision: where the checkpoint has no other fp32 weights (see MAIN_WEIGHTS)."""
    entries = by_parameter(model_state)
    wanted = {}
    for name, parameter in phase_optimizer.loaded_parameters():
        like = entries[id(parameter)]
        if phase_optimizer.state_format == "zero":
            like = only_copy(like)
        wanted[name] = fp32_like(like, like.key, _empty(like))
    return wanted


def _empty(like: Sharded) -> torch.Tensor:
    return torch.empty_like(like.data, dtype=torch.float32, requires_grad=False)


def fp32_like(like: Sharded, key: str, data: torch.Tensor) -> Sharded:
    """The entry of another tensor that is cut over the ranks as `like` is.

    Args:
        data: fp32, of the shape of `like.data`.
    """
    if isinstance(like, ShardedTensorFactory):
        return replace(like, key=key, data=data)
    return replace(like, key=key, data=data, dtype=torch.float32)


def only_copy(entry: Sharded) -> Sharded:
    """The entry of the one data-parallel rank that has it: megatron-core's replica ids end in that rank."""
    return replace(entry, replica_id=(*entry.replica_id[:-1], 0))


def step_count(common: Any) -> float:
    """The one that all parameters share, wherever the optimizer that wrote it keeps it."""
    count = _step_count(common)
    assert count is not None, "the checkpoint's optimizer has no step count"
    return count


def _step_count(common: Any) -> float | None:
    if isinstance(common, dict):
        for key in ("common_step", "step"):
            if key in common:
                return float(common[key])
    values = common.values() if isinstance(common, dict) else common if isinstance(common, list) else ()
    return next((count for value in values if (count := _step_count(value)) is not None), None)
