"""Layouts of four ranks train what one rank trains: a tiny model, a few steps of each phase, every statistic.

Whole runs are in test_layouts.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import pytest

from gsa_data.pack import document_ids
from gsa_train.model import query_sample
from helpers.many_layouts import (
    BASELINE,
    BOUNDARIES,
    CASES,
    EOS,
    EQUAL,
    LENGTH,
    RESHARDED,
    SAMPLE,
    SELECTED,
    WORLD,
    blocks,
    train_case,
)
from helpers.margins import measured_margins
from helpers.runs import run_script
from helpers.single_rank import single_rank

pytestmark = pytest.mark.slow

CLEAR_MARGIN = 1e-4
"""Of a selection: a hundred times what fp32 rounds in these few steps."""
TIES = {"max_activation_token"}
"""Where a document begins with the same token twice both have the same activations, but for rounding. In the text of
SELECTED no token comes twice."""
VARIANCE = 5e-5
"""Relative: of scores near 1 fp32 keeps 6e-8, of their deviations, 0.03, so 2e-6, and of the squares' mean after a step
ten times as much."""
COUNTS = {"value_gate_low", "value_gate_high", "output_gate_low", "output_gate_high", "indexer_saturated"}
"""Shares of what is beyond a threshold: with large weights some of it lies near, and rounding decides."""
_one_rank: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("many_layouts")
    run_script(["tests/helpers/many_layouts.py", str(folder)], folder / "log", ranks=WORLD)
    return json.loads((folder / "results.json").read_text())


def one_rank(name: str) -> list[dict[str, Any]]:
    """The same config without layout or recomputation, trained in this process."""
    case = CASES[name]
    key = f"{case.sections} {case.layers} {case.steps}"
    if key not in _one_rank:
        with pytest.MonkeyPatch.context() as patch, measured_margins() as margins:
            for constant, value in SAMPLE.items():
                patch.setattr(query_sample, constant, value)
            _one_rank[key] = train_case(case.config({}), single_rank(), case.steps)
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


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_rank(name: str, results: Any) -> None:
    found, expected = results["trained"][name], one_rank(name)
    if CASES[name].sections is not BASELINE:
        layers = CASES[name].config().model.num_layers
        assert all(len(record["indexer_kl"]) == layers for record in found)  # from every stage and chunk
    if CASES[name].sections is SELECTED:
        assert max(expected[-1]["recall"]) < 0.9  # keys are left out in every layer
        assert_same(found, expected, relative=1e-5, but=COUNTS)
    else:
        assert_same(found, expected, relative=1e-5, but=TIES)


@pytest.mark.parametrize("name", EQUAL)
def test_what_only_moves_work_changes_no_bit(name: str, results: Any) -> None:
    assert results["trained"][name] == results["trained"][EQUAL[name]]


@pytest.mark.parametrize("name", RESHARDED)
def test_a_checkpoint_goes_on_in_other_layouts(name: str, results: Any) -> None:
    (writer, expected), *others = results["resumed"][name]
    assert len(others) == len(RESHARDED[name].readers)
    for layout, found in others:
        assert layout
        assert_same(found, expected, relative=1e-5, but=TIES)
        if layout == writer:
            assert found == expected


@pytest.mark.parametrize("name", BOUNDARIES)
def test_fp32_weights_go_on_in_the_next_phase(name: str, results: Any) -> None:
    """To the last bit, whether it begins in the same process or from the checkpoint before it."""
    uninterrupted, resumed = results["crossed"][name]
    assert uninterrupted == resumed
    records, finer = resumed
    assert finer
    assert all(record["update_norm"] > 0 for record in records)


def test_documents_cross_the_borders_of_chunks() -> None:
    """Otherwise these layouts would say nothing about documents under context parallelism."""
    ids = document_ids(blocks(0, CASES["context"].config())[:, :LENGTH].long(), EOS)
    for size in (2, 4):
        borders = range(LENGTH // (2 * size), LENGTH, LENGTH // (2 * size))
        assert any((ids[:, border] == ids[:, border - 1]).any() for border in borders)
        assert any((ids[:, border] != ids[:, 0]).any() for border in borders)
