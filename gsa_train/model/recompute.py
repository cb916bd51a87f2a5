"""Recompute a layer's attention in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.cores.over_chunks import Projected


class RecomputedAttention:
    """Calls `attend` for activation checkpointing: without a graph in the forward pass, and again in the backward
    pass. The second call drops the selections. The checkpoint's autograd node would otherwise keep them until the
    schedule drops the micro-batch's loss."""

    def __init__(
        self, attend: Callable[..., torch.Tensor], selections: list[Any] | None, attention_pass: AttentionPass
    ) -> None:
        first = replace(attention_pass, will_recompute=True)
        self._attend, self._calls = attend, [(selections, first), (selections, attention_pass)]

    def __call__(self, *projected: torch.Tensor) -> torch.Tensor:
        selections, attention_pass = self._calls.pop(0)
        return self._attend(Projected(*projected), selections=selections, attention_pass=attention_pass)
