"""Tests that statistics of attention agree if they are measured in two ways, or with their definition per pair."""

import pytest
import torch

from gsa_kernels.reference import causal_mask
from gsa_train.model.probes import query_sample
from gsa_train.model.probes.saturation import FLAT_SLOPE, largest_logit, saturated_share
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


def test_layers_without_indexer_report_recall_but_no_loss_of_their_own() -> None:
    stats = measure(tiny_config(model={"num_layers": 4}, gsa={"selection_reuse": 2}), SPARSE)
    assert [value == value for value in stats["indexer_kl"]] == [True, False, True, False]
    assert all(0 < value <= 1 for value in stats["recall"])


# --- the largest logit, and the share of indexer scores without slope ----------------------------------------

POSITIONS = torch.tensor([0, 3, 8])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def visible(documents: bool) -> torch.Tensor:
    ids = torch.tensor([[0] * 9, [0, 0, 1, 1, 1, 1, 2, 2, 2] if documents else [0] * 9])
    return causal_mask(9, query_positions=POSITIONS) & (ids[:, POSITIONS, None] == ids[:, None])


@pytest.mark.parametrize("documents", [False, True])
def test_the_largest_logit_matches_a_causal_pair(documents: bool) -> None:
    q, k, mask = draw(2, 3, 4, 8), draw(2, 9, 2, 8), visible(documents)
    logits = [
        (q[b, t, head] @ k[b, s, head // 2]).item() / 8**0.5
        for b in range(2)
        for t in range(3)
        for head in range(4)
        for s in range(9)
        if mask[b % len(mask), t, s]
    ]
    assert largest_logit(q, k, mask).item() == pytest.approx(max(logits), rel=1e-5)
    hidden = k.clone()
    hidden[:, 8, :, :] = 100 * q[:, 1, ::2]  # of the last token, which is not causal for the second query
    assert largest_logit(q[:, :2], hidden, mask[:, :2]) == largest_logit(q[:, :2], k, mask[:, :2])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_saturated_are_activations_without_slope(activation: str, documents: bool) -> None:
    queries, keys, bias, mask = 6 * draw(2, 3, 2, 4), draw(2, 9, 4), draw(2), visible(documents)
    bias = bias if activation == "sigmoid" else None
    found = saturated_share(queries, keys, bias, activation, (mask.to(queries.dtype), mask.sum(-1)))
    for b in range(2):
        for t in range(3):
            for head in range(2):
                seen = mask[b % len(mask), t]
                z = (keys[b, seen] @ queries[b, t, head] / 2).requires_grad_()
                shifted = z if bias is None else z + bias[head]
                (shifted.sigmoid() if bias is not None else shifted.relu()).sum().backward()
                wanted = (z.grad < FLAT_SLOPE).float().mean()
                assert found[b, t, head].item() == pytest.approx(wanted.item())
    assert 0 < found.mean() < 1
