"""megatron-core's mark of a routed expert's parameters: their replicas are other ranks than those of all else."""

from __future__ import annotations

from typing import Any

import torch


def mark_as_expert(parameter: Any) -> None:
    """megatron-core itself marks experts only where `parallel.expert` is above 1. Without it, where `parallel.tensor`
    splits everything but experts, it adds up the gradients of too few ranks."""
    parameter.allreduce = False


def is_of_expert(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)
