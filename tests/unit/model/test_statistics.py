"""Tests statistics of attention for which two ways of measuring must agree."""

import pytest
import torch

from gsa_train.model.probes import query_sample
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    measure,
    random_batches,
    read_stats,
    tiny_config,
    tiny_model,
    token_losses,
)


def test_recall_is_the_same_from_dense_probabilities_and_from_sparse_attention() -> None:
    """The test uses only the first layer, because later activations differ between the phases."""
    config = tiny_config(gsa={"local_window": 2})
    dense, sparse = measure(config, WARM_UP), measure(config, SPARSE)
    assert dense["recall"][0] == pytest.approx(sparse["recall"][0], rel=1e-6)
    for name in ("random_recall", "overlap_heads", "overlap_mean"):
        assert dense[name][0] == sparse[name][0] < 1
    assert 0.1 < sparse["recall"][0] < 0.99
    assert dense["selected_keys"][0] == sparse["selected_keys"][0] > sparse["k_mean"][0]


def test_selecting_everything_is_dense_attention() -> None:
    everything = {"k_min": 16, "k_base": 16, "k_max": 16}
    config = tiny_config(gsa=everything)
    stats = measure(config, SPARSE)
    assert stats["dense_query_share"] == [1.0, 1.0]
    of_choices = {"recall", "random_recall", "k_mean", "k_min", "k_max", "adjacent_overlap", "union_ratio_32"}
    of_choices |= {"overlap_heads", "overlap_mean"}
    assert not of_choices & stats.keys()  # no query leaves keys out
    losses = []
    for phase in (SPARSE, DENSE):
        model = tiny_model(config)
        enter_phase(model, phase)
        losses.append(token_losses(model, random_batches(config)[0]))
    assert torch.equal(losses[0], losses[1])


def test_attention_to_the_start_of_nearly_equal_logits_is_one_over_the_visible_keys(monkeypatch):
    monkeypatch.setattr(query_sample, "SPARSE_EVERY", 1)
    config = tiny_config(model={"init_std": 1e-4}, train={"global_batch_size": 2})
    model = tiny_model(config)
    enter_phase(model, DENSE)
    token_losses(model, random_batches(config, attend_across=True)[0], measuring=True)
    expected = sum(1 / count for count in range(1, 17)) / 16
    assert read_stats(model)["sequence_start_attention"] == pytest.approx([expected] * 2, rel=1e-3)
