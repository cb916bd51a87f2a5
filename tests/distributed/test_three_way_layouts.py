"""Tests that layouts of eight ranks with three kinds of parallelism equal one rank."""

import json
from typing import Any

import pytest

from helpers.layout_comparison import assert_trains_as_one_rank
from helpers.runs import run_script
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
    folder = tmp_path_factory.mktemp("three_way_layouts")
    run_script(["tests/helpers/three_way_layouts.py", str(folder)], folder / "log", ranks=WORLD)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_training_matches_one_rank(name: str, results: Any) -> None:
    layout, found = results[name]
    assert tuple(layout) == SIZES[name]
    assert_trains_as_one_rank(CASES[name], found)
