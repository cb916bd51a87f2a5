"""Measures how far selections in training are from ties, which rounding would decide differently on each processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from gsa_kernels import operations_reference as reference


@dataclass
class Margins:
    """Holds the smallest relative distances over all queries; infinite until a query had a choice."""

    score: float = math.inf
    """Distance of the last selected key's score from the next one's, divided by the query's largest score."""
    budget: float = math.inf
    """Distance of an unrounded budget to the next integer, for budgets within their bounds."""


@contextmanager
def measured_margins() -> Iterator[Margins]:
    """Measure the margins of the reference's selections in this process."""
    margins = Margins()
    select_top_k, adaptive_budget = reference.select_top_k, reference.adaptive_budget

    def select(scores: torch.Tensor, visible: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        selected = select_top_k(scores, visible, budget)
        last = torch.where(selected, scores, math.inf).amin(-1)
        following = torch.where(visible & ~selected, scores, -math.inf).amax(-1)
        distance = (last - following) / torch.where(visible, scores, 0).abs().amax(-1)
        margins.score = min(margins.score, distance.min().item())
        return selected

    def budget_of(
        variance: torch.Tensor, ema: torch.Tensor, visible: torch.Tensor, **rule: Any
    ) -> torch.Tensor:
        raw = rule["k_base"] * ema.double() / variance.double()
        assert rule["adaptive_k"] == "inverse"
        free = raw[(raw > rule["k_min"] - 0.5) & (raw < rule["k_max"] + 0.5)]
        if free.numel() > 0:
            margins.budget = min(margins.budget, ((free - free.round()).abs() / free).min().item())
        return adaptive_budget(variance, ema, visible, **rule)

    with (
        patch.object(reference, "select_top_k", select),
        patch.object(reference, "adaptive_budget", budget_of),
    ):
        yield margins
