"""Tests that layouts of eight ranks with three kinds of parallelism equal one rank."""

from typing import Any

import pytest

from helpers.layout_comparison import assert_trains_as_one_rank
from helpers.runs import results_of
from helpers.three_way_layouts import CASES, WORLD

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SIZES = {
    "tensor x pipeline x context": (2, 2, 1, 2),
    "tensor x pipeline x data": (2, 2, 2, 1),
    "tensor x context x data": (2, 1, 2, 2),
}
"""Tensor, pipeline, data and context."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of("three_way_layouts", tmp_path_factory, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_training_matches_one_rank(name: str, results: Any) -> None:
    layout, found = results[name]
    assert tuple(layout) == SIZES[name]
    assert_trains_as_one_rank(CASES[name], found)
