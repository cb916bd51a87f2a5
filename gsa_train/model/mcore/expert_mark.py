"""Mark expert parameters as megatron-core does: they are replicated over different ranks than dense parameters."""

from __future__ import annotations

from typing import Any

import torch


def mark_as_expert(parameter: Any) -> None:
    """Mark an expert's parameter with `allreduce = False`.

    megatron-core sets this mark only if `parallel.expert` is above 1. Experts also need the mark if `parallel.tensor`
    shards everything except experts. Otherwise, their gradients would be reduced over too few ranks.
    """
    parameter.allreduce = False


def is_of_expert(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)
