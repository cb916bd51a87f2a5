"""Tests mixtures of experts in parallel layouts of four ranks. Each layout must match one rank's results, and must
resume checkpoints of other layouts."""

import math
from typing import Any

import pytest

from helpers.expert_layouts import BOUNDARIES, CASES, NIGHTLY_BOUNDARIES, RESHARDED, WORLD, train
from helpers.layout_comparison import TIES, assert_carries_weights_over, assert_goes_on, assert_same, one_rank
from helpers.runs import results_of
from helpers.tiers import cases_of, chosen, with_nightly

pytestmark = pytest.mark.slow
CLEAR_MARGIN = 3e-5
"""Smallest allowed distance between two experts' scores, far above their fp32 rounding."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    wanted = {
        "trained": chosen(request, test_training_matches_one_rank.__name__),
        "resumed": chosen(request, test_a_checkpoint_goes_on_in_other_layouts.__name__),
        "crossed": chosen(request, test_fp32_weights_go_on_in_the_next_phase.__name__),
    }
    return results_of("expert_layouts", tmp_path_factory, WORLD, wanted)


def test_no_two_experts_are_so_near_that_rounding_chooses(results: Any) -> None:
    """Otherwise the other tests of this file would depend on the processor."""
    if not results["trained"]:
        pytest.skip("no layout was chosen beside it")
    assert math.inf > results["margin"] > CLEAR_MARGIN


@pytest.mark.parametrize("name", cases_of(CASES))
def test_training_matches_one_rank(name: str, results: Any) -> None:
    """The test compares every number of both phases and of the validation, and the routers' final loads or biases."""
    *found, balances = results["trained"][name]
    *expected, expected_balances = one_rank(CASES[name], train)
    assert_same(found, expected, relative=1e-5, but=TIES)
    assert balances == expected_balances
    names = {"router_entropy", "router_z", "expert_loads/00"}
    names |= {"expert_bias_range"} if CASES[name].sections["moe"].get("balancing") else {"router_balance"}
    names |= {"dropped_share"} if "capacity_factor" in CASES[name].sections["moe"] else set()
    assert names <= found[-1].keys()  # of the validation, and so compared


@pytest.mark.parametrize("name", cases_of(RESHARDED))
def test_a_checkpoint_goes_on_in_other_layouts(name: str, results: Any) -> None:
    assert_goes_on(results["resumed"][name], RESHARDED[name])


def test_a_load_sends_no_rank_the_experts_of_another(results: Any) -> None:
    if not results["resumed"]:
        pytest.skip("no checkpoint was chosen beside it")
    assert results["loads"]["sent"] > 0
    assert results["loads"]["unwanted"] == 0


@pytest.mark.parametrize("name", with_nightly(BOUNDARIES, NIGHTLY_BOUNDARIES))
def test_fp32_weights_go_on_in_the_next_phase(name: str, results: Any) -> None:
    """Bits are equal whether the phase begins in the same process or from the checkpoint before it."""
    assert_carries_weights_over(results["crossed"][name])
