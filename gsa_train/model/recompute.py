"""A layer's attention, calculated again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.cores.over_chunks import Projected


class CalledTwice:
    """`attend` for a checkpoint, which calls it twice: in the forward pass without a graph, then in the backward pass.

    The second call lets go of the selections: the checkpoint's node lives as long as the micro-batch's loss, which
    the schedule holds.
    """

    def __init__(
        self, attend: Callable[..., torch.Tensor], selections: list[Any] | None, attention_pass: AttentionPass
    ) -> None:
        first = replace(attention_pass, is_first_of_two=True)
        self._attend, self._calls = attend, [(selections, first), (selections, attention_pass)]

    def __call__(self, *projected: torch.Tensor) -> torch.Tensor:
        selections, attention_pass = self._calls.pop(0)
        return self._attend(Projected(*projected), selections=selections, attention_pass=attention_pass)
