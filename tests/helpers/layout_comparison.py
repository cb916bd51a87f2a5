"""Trains on one rank, and compares the numbers of a layout with it."""

import math
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gsa_kernels import operations_reference as reference
from gsa_train.model.probes import query_sample
from helpers.layout_cases import BASELINE, SAMPLE, SELECTED, Case, Reshard
from helpers.many_layouts import train_case
from helpers.single_rank import single_rank

CLEAR_MARGIN = 1e-4
"""Tolerance of a selection: a hundred times the fp32 rounding of these few steps."""
COUNTS = {"value_gate_low", "value_gate_high", "output_gate_low", "output_gate_high", "indexer_saturated"}
"""Shares of values beyond a threshold: with large weights some values are near it, and rounding decides."""
TIES = {"max_activation_token"}
"""Statistics that rounding may change. If a document begins with the same token twice, both tokens have equal
activations up to rounding. In the text of SELECTED no token occurs twice."""
VARIANCE = 5e-5
"""Relative tolerance of variances. fp32 errors of scores near 1 are large against their deviations of 0.03."""
_one_rank: dict[str, list[Any]] = {}


@dataclass
class Margins:
    """Holds the smallest relative distances over all queries; infinite until a query had a choice."""

    score: float = math.inf
    """Distance of the last selected key's score from the next key's score, divided by the query's largest score."""
    budget: float = math.inf
    """Distance of an unrounded budget to the next integer, for budgets within their bounds."""


@contextmanager
def measured_margins() -> Iterator[Margins]:
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

    with patch.multiple(reference, select_top_k=select, adaptive_budget=budget_of):
        yield margins


train_dense: Callable[..., list[Any]] = partial(train_case, tasks=True)


def one_rank(case: Case, train: Callable[..., list[Any]] = train_dense) -> list[Any]:
    """Train the same config in this process without layout or recomputation."""
    key = f"{case.sections} {case.layers} {case.steps}"
    if key not in _one_rank:
        with pytest.MonkeyPatch.context() as patch, measured_margins() as margins:
            for constant, value in SAMPLE.items():
                patch.setattr(query_sample, constant, value)
            _one_rank[key] = train(case.config({}), single_rank(), case.steps)
        if case.sections is SELECTED:
            assert min(margins.score, margins.budget) > CLEAR_MARGIN, margins
    return _one_rank[key]


def assert_same(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], relative: float, but: Set[str] = frozenset()
) -> None:
    assert len(found) == len(expected)
    for step, (record, other) in enumerate(zip(found, expected, strict=True)):
        assert record.keys() == other.keys()
        for key in record.keys() - but:
            near = VARIANCE if key in ("variance", "variance_ema") else relative
            assert record[key] == pytest.approx(other[key], rel=near, abs=1e-9, nan_ok=True), (step, key)


def assert_trains_as_one_rank(case: Case, found: list[dict[str, Any]]) -> None:
    """Check that a layout's numbers equal one rank's, in all steps and the validation. They include each
    phase's statistics."""
    expected = one_rank(case)
    if case.sections is not BASELINE:
        layers = case.config().model.num_layers
        of_layers = [*(found[end - 1] for end in accumulate(case.steps)), found[-1]]
        assert all(len(record["indexer_kl"]) == layers for record in of_layers)  # from every stage and chunk
    if case.sections is SELECTED:
        # Keys are left out in every layer.
        assert max(expected[-1]["recall"] + expected[-1]["overlap_heads"]) < 0.9
        assert_same(found, expected, relative=1e-5, but=COUNTS)
    else:
        assert_same(found, expected, relative=1e-5, but=TIES)


def assert_goes_on(resumed: list[Any], case: Reshard) -> None:
    """Check that all layouts that read a checkpoint give the numbers of the layout that wrote it."""
    (writer, expected), *others = resumed
    assert len(others) == len(case.readers)
    for layout, found in others:
        assert layout
        assert_same(found, expected, relative=1e-5)
        if layout == writer:
            assert found == expected


def assert_carries_weights_over(crossed: list[Any]) -> None:
    """Check that an uninterrupted run equals a run from a checkpoint, whose fp32 weights bf16 cannot
    represent."""
    uninterrupted, resumed = crossed
    assert uninterrupted == resumed
    records, finer = resumed
    assert finer
    assert all(record["update_norm"] > 0 for record in records)
