"""Tests that two whole runs in parallel layouts log the numbers of a run on one rank.

Every query selects all its causal keys. In a smaller selection, rounding would decide between the keys of a repeated
token, because these keys have equal scores. test_many_layouts.py covers smaller selections.
"""

import pytest

from gsa_train.validation.perplexity import scores_of
from helpers.runs import QUICK_STEPS, Run, whole_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["tensor x pipeline", "context"])
def test_a_whole_run_matches_one_rank(name: str) -> None:
    one, many = whole_run("one rank"), whole_run(name)
    assert one.series("dense_query_share")[-1] == 1  # no key is left out
    assert_same_training(many, one)
    assert_same_validation(many, one)


def assert_same_training(run: Run, reference: Run) -> None:
    assert run.series("step") == reference.series("step") == list(range(1, QUICK_STEPS + 1))
    assert run.series("data_checksum") == reference.series("data_checksum")
    for key in ("loss", "indexer_kl", "grad_norm", "layer_indexer_kl", "layer_variance_ema"):
        for step, (value, expected) in enumerate(zip(run.series(key), reference.series(key), strict=True), 1):
            assert value == pytest.approx(expected, rel=1e-5, abs=0, nan_ok=True), (key, step)


def assert_same_validation(run: Run, reference: Run) -> None:
    """Compare 15 sequences, then each source's sequences; most layouts pad the last round."""
    found, expected = (scores_of(each.records()[-1]) for each in (run, reference))
    assert len(expected["validation_loss_by_source"]) > 1
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "perplexity" not in key:  # exp(loss) amplifies rounding
            assert found[key] == pytest.approx(value, rel=1e-5), key
