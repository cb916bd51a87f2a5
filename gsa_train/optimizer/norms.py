"""Compute global norms of a phase's gradients and updates, and clip gradients. Each parameter counts once.

The host does not wait for the device.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from gsa_train.distributed.megatron_versions import main_grads
from gsa_train.distributed.parallel import Parallel
from gsa_train.optimizer.build import OptimizerKind


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers inside a chained optimizer of megatron-core, or the optimizer itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return megatron-core's optimizers that have parameters on this rank."""
    return [each for each in chained(optimizer) if each.optimizer is not None]


@torch.no_grad()
def reduce_grad_norm(
    optimizer: MegatronOptimizer, loss_share: torch.Tensor, parallel: Parallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `PhaseOptimizer.reduce_grad_norm` in one collective over all ranks, which then decide by equal bits."""
    optimizer.prepare_grads()
    squares = torch.zeros((), dtype=torch.float64, device=parallel.device)
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(
        list
    )  # experts have other replicas than dense parameters
    for inner in chained(optimizer):
        by_copies[_copies(inner, parallel)] += main_grads(inner)
    for copies, grads in by_copies.items():
        squares = squares + sum_of_squares(grads, parallel.device) / copies
    sums = torch.stack([squares, loss_share.double()])
    dist.all_reduce(sums)
    return sums[0].sqrt().float(), sums[1]


@torch.no_grad()
def clipped_step(
    optimizer: MegatronOptimizer, norm: torch.Tensor, max_norm: float, applied: torch.Tensor
) -> None:
    """Implement `PhaseOptimizer.clipped_step`. In megatron-core's version the host waits for each tensor's
    norm. torch's fused optimizers read the gradients' scale and the flag to skip the update on the device. With
    such an optimizer the host does not wait here."""
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    inners = inner_optimizers(optimizer)
    # torch's GradScaler recognizes such optimizers by this attribute.
    if norm.is_cuda and all(getattr(each.optimizer, "_step_supports_amp_scaling", False) for each in inners):
        for inner in inners:
            inner.optimizer.grad_scale = divisor
            inner.optimizer.found_inf = applied.logical_not().float()
        optimizer.step_with_ready_grads()
    elif applied:
        for parameter in (p for inner in chained(optimizer) for p in inner.get_parameters()):
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        optimizer.step_with_ready_grads()


@torch.no_grad()
def update_norm(
    optimizer: MegatronOptimizer, kind: OptimizerKind, applied: torch.Tensor, parallel: Parallel
) -> torch.Tensor:
    """Implement `PhaseOptimizer.update_norm` from the state after the step, without a copy of the old weights."""
    squares = torch.zeros((), dtype=torch.float64, device=parallel.device)
    for inner in inner_optimizers(optimizer):
        updated, counted = inner.optimizer, {id(p) for p in inner.get_parameters() if counts_for_norms(p)}
        for group in updated.param_groups:
            parameters = [p for p in group["params"] if id(p) in counted]
            if parameters:
                change = kind.squared_change([updated.state[p] for p in parameters], group, parameters)
                squares += change / _copies(inner, parallel)
    squares = torch.where(applied, squares, 0)
    dist.all_reduce(squares)
    return squares.sqrt().float()


def _copies(inner: Any, parallel: Parallel) -> int:
    """Count the ranks with the same gradients and state: the replicas, or the distributed optimizer's instances."""
    sharing: int = inner.get_grad_stats_parallel_group().size()
    return parallel.world_size // sharing


def counts_for_norms(parameter: torch.Tensor) -> bool:
    """Whether this rank counts the parameter. A replica of another rank does not count, as in megatron-core."""
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares, 0-d fp64. On CPUs torch's sequential fp32 sums have errors that depend on the
    sharding, and clipping would carry the errors into the weights."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        norms = list(torch._foreach_norm(tensors))
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).double().square().sum()
