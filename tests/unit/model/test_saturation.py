"""Compares the largest attention logit, and the share of indexer scores without slope, with definitions per pair."""

from __future__ import annotations

import pytest
import torch

from gsa_kernels.reference import causal_mask
from gsa_train.model.probes.saturation import FLAT_SLOPE, largest_logit, saturated_share

POSITIONS = torch.tensor([0, 3, 8])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def visible(documents: bool) -> torch.Tensor:
    ids = torch.tensor([[0] * 9, [0, 0, 1, 1, 1, 1, 2, 2, 2]]) if documents else None
    return causal_mask(9, query_positions=POSITIONS, document_ids=ids)


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
