"""AdamW inside of megatron-core's optimizers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """megatron-core's optimizers inside this one, or itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Those of megatron-core's that have parameters on this rank."""
    return [o for o in chained(optimizer) if isinstance(o.optimizer, torch.optim.AdamW)]


def create_state(optimizer: MegatronOptimizer) -> None:
    """Give AdamW its state before the first step, which a checkpoint may fill. On GPUs it updates in one kernel.

    A rank whose shard holds no parameter, but padding, gets an empty one, which counts steps.
    """
    for inner in inner_optimizers(optimizer):
        _use_one_kernel(inner.optimizer)
        if not any(group["params"] for group in inner.optimizer.param_groups):
            nothing = torch.zeros(0, device=torch.cuda.current_device())
            nothing.grad = torch.zeros_like(nothing)
            inner.optimizer.param_groups[0]["params"].append(nothing)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                inner.optimizer.state[parameter].update(
                    step=torch.zeros((), device=parameter.device),
                    exp_avg=torch.zeros_like(parameter.data),
                    exp_avg_sq=torch.zeros_like(parameter.data),
                )


def _use_one_kernel(adam: torch.optim.AdamW) -> None:
    """On GPUs; torch otherwise passes about ten times over the weights. Its step counts are on the device then."""
    on_gpu = torch.cuda.is_available()
    for group in adam.param_groups:
        group["fused"], group["foreach"] = on_gpu, False if on_gpu else None
