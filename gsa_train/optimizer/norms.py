"""List the parameters that count in global norms of gradients and updates, and sum their squares."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers inside a chained optimizer of megatron-core, or the optimizer itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return megatron-core's optimizers that have parameters on this rank."""
    return [each for each in chained(optimizer) if each.optimizer is not None]


def counts_for_norms(parameter: torch.Tensor) -> bool:
    """Whether this rank counts the parameter. A replica of another rank does not count, as in megatron-core."""
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares, 0-d fp64. On CPUs the squares are added in fp64: torch adds them one by one, so fp32
    rounding errors would depend on the sharding, and clipping would carry these errors into the weights."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        norms = list(torch._foreach_norm(tensors))
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).double().square().sum()
