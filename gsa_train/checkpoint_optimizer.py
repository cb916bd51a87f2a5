"""Optimizer state from a checkpoint of the other kind: plain to distributed optimizer, and back.

megatron-core loads each kind only into itself, but both save the moments by the names of the parameters. Here every
parameter's state is loaded whole (in its tensor-parallel shape) and put where this optimizer keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gsa_train.optim import PhaseOptimizer, inner_optimizers

PREFIX = "optimizer.state"
MOMENTS = ("exp_avg", "exp_avg_sq")


def is_distributed(phase_optimizer: PhaseOptimizer) -> bool:
    return bool(phase_optimizer.ddps[0].ddp_config.use_distributed_optimizer)


def wanted_state(
    phase_optimizer: PhaseOptimizer, model_state: dict[str, Any], saved_keys: set[str]
) -> dict[str, dict[str, Any]]:
    """Name of each trained parameter -> its sharded fp32 weight and moments, to be loaded.

    Args:
        model_state: the model's sharded state dict.
        saved_keys: names of the tensors in the checkpoint.

    Raises:
        KeyError: the checkpoint lacks the state of a parameter.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    by_parameter = {id(each.data): each for each in nested_values(sharded)}
    wanted = {}
    for name, parameter, _ in _trained(phase_optimizer):
        like = by_parameter[id(parameter)]
        keys = {moment: f"{PREFIX}.{moment}.{like.key}" for moment in MOMENTS}
        for kind in ("param", "fp32_param"):  # a plain optimizer of fp32 weights saves no copy of them
            if f"{PREFIX}.{kind}.{like.key}" in saved_keys:
                keys["param"] = f"{PREFIX}.{kind}.{like.key}"
        missing = [key for key in keys.values() if key not in saved_keys]
        if missing:
            raise KeyError(f"the checkpoint has no {', '.join(missing)}")
        wanted[name] = {kind: _fp32(like, key) for kind, key in keys.items()}
    return wanted


@torch.no_grad()
def fill(phase_optimizer: PhaseOptimizer, loaded: dict[str, dict[str, torch.Tensor]], common: Any) -> None:
    """Put what was loaded into the optimizer, after the model's weights; `common` is the optimizer's part of what the
    ranks share."""
    count = _step_count(common)
    assert count is not None, "the checkpoint's optimizer has no step count"
    for name, parameter, inner in _trained(phase_optimizer):
        tensors = {"param": parameter.detach(), **loaded[name]}
        if isinstance(inner, DistributedOptimizer):
            if parameter not in inner.model_param_group_index_map:
                continue  # all of it is other ranks'
            part = inner._get_model_param_range_map(parameter)["param"]
            flat = {kind: tensor.flatten()[part.start : part.end] for kind, tensor in tensors.items()}
            inner._set_main_param_and_optimizer_states(parameter, flat)
        else:
            main = getattr(parameter, "main_param", parameter)
            main.data.copy_(tensors["param"])
            for moment in MOMENTS:
                inner.optimizer.state[main][moment].copy_(tensors[moment])
    for inner in inner_optimizers(phase_optimizer.optimizer):
        for state in inner.optimizer.state.values():
            state["step"].fill_(count)


def _trained(phase_optimizer: PhaseOptimizer) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """Name, parameter and its optimizer."""
    (inner,) = inner_optimizers(phase_optimizer.optimizer)
    for number, ddp in enumerate(phase_optimizer.ddps):
        for name, parameter in ddp.named_parameters():
            if parameter.requires_grad:
                yield f"{number}.{name}", parameter, inner


def _fp32(like: ShardedTensor | ShardedTensorFactory, key: str) -> ShardedTensor | ShardedTensorFactory:
    data = torch.empty_like(like.data, dtype=torch.float32, requires_grad=False)
    if isinstance(like, ShardedTensorFactory):
        return replace(like, key=key, data=data)
    return replace(like, key=key, data=data, dtype=torch.float32)


def _step_count(common: Any) -> float | None:
    """The one that all parameters share, wherever the optimizer that wrote it keeps it."""
    if isinstance(common, dict):
        for key in ("common_step", "step"):
            if key in common:
                return float(common[key])
    values = common.values() if isinstance(common, dict) else common if isinstance(common, list) else ()
    return next((count for value in values if (count := _step_count(value)) is not None), None)
