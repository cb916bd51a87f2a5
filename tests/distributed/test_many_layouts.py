"""Tests that layouts of four ranks train as one rank does.

Each layout trains a tiny model for a few steps. The tests compare every statistic.
"""

from typing import Any

import pytest

from gsa_data.pack import document_ids
from helpers.layout_cases import BOUNDARIES, CASES, EQUAL, LENGTH, NIGHTLY_BOUNDARIES, RESHARDED, WORLD
from helpers.layout_comparison import assert_carries_weights_over, assert_goes_on, assert_trains_as_one_rank
from helpers.many_layouts import blocks
from helpers.runs import results_of
from helpers.single_rank import EOS
from helpers.tiers import cases_of, chosen, with_nightly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    equal = chosen(request, test_what_only_moves_work_changes_no_bit.__name__)
    trained = {*chosen(request, test_training_matches_one_rank.__name__), *equal, *map(EQUAL.get, equal)}
    wanted = {
        "trained": [name for name in CASES if name in trained],
        "resumed": chosen(request, test_a_checkpoint_goes_on_in_other_layouts.__name__),
        "crossed": chosen(request, test_fp32_weights_go_on_in_the_next_phase.__name__),
    }
    return results_of("many_layouts", tmp_path_factory, WORLD, wanted)


@pytest.mark.parametrize("name", cases_of(CASES))
def test_training_matches_one_rank(name: str, results: Any) -> None:
    assert_trains_as_one_rank(CASES[name], results["trained"][name])


@pytest.mark.parametrize("name", with_nightly(EQUAL, {name for name in EQUAL if CASES[name].nightly}))
def test_what_only_moves_work_changes_no_bit(name: str, results: Any) -> None:
    assert results["trained"][name] == results["trained"][EQUAL[name]]


@pytest.mark.parametrize("name", cases_of(RESHARDED))
def test_a_checkpoint_goes_on_in_other_layouts(name: str, results: Any) -> None:
    assert_goes_on(results["resumed"][name], RESHARDED[name])


@pytest.mark.parametrize("name", with_nightly(BOUNDARIES, NIGHTLY_BOUNDARIES))
def test_fp32_weights_go_on_in_the_next_phase(name: str, results: Any) -> None:
    """Bits are equal whether the phase begins in the same process or from the checkpoint before it."""
    assert_carries_weights_over(results["crossed"][name])


def test_documents_cross_the_borders_of_chunks() -> None:
    """Otherwise the layouts would not test documents under context parallelism."""
    ids = document_ids(blocks(0, CASES["context"].config())[:, :LENGTH].long(), EOS)
    for size in (2, 4):
        borders = range(LENGTH // (2 * size), LENGTH, LENGTH // (2 * size))
        assert any((ids[:, border] == ids[:, border - 1]).any() for border in borders)
        assert any((ids[:, border] != ids[:, 0]).any() for border in borders)
