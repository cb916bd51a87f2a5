"""Tests QK-clip against plain torch in fp64, head by head. The layout tests train with it."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gsa_train.model.attention import AttentionOverChunks, Projected
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import build_optimizer
from helpers.single_rank import DENSE, random_batches, take_step, tiny_config, tiny_model

HEADS, SIZE, THRESHOLD = 4, 4, 12.0


def log_sums(projected: Projected) -> list[float]:
    """Return each head's largest log-sum-exp over the causal keys of a query's document."""
    documents, found = projected.document_ids, []
    causal = torch.ones(documents.shape[1], documents.shape[1]).tril().bool()
    for head in range(HEADS):
        q = projected.q[:, :, head].double()
        k = projected.k[:, :, head * projected.k.shape[2] // HEADS].double()
        allowed = causal & (documents[:, :, None] == documents[:, None, :])
        found.append((q @ k.mT / SIZE**0.5).masked_fill(~allowed, -math.inf).logsumexp(-1).max().item())
    return found


def stepped(clip: float, kv_heads: int, train: dict[str, Any], sharded: bool) -> tuple[Model, Any, Any]:
    """Return a model after a step, its optimizer, and by layer each head's largest log-sum-exp."""
    size = {"qkv_bias": True, "init_std": 0.5, "num_kv_heads": kv_heads}
    parallel = {"distributed_optimizer": sharded}
    config = tiny_config([DENSE], model=size, train={**train, "qk_clip": clip}, parallel=parallel)
    model = tiny_model(config)
    for attention in model.attentions:
        torch.nn.init.normal_(attention.linear_qkv.bias, generator=torch.Generator().manual_seed(3))
    optimizer = build_optimizer(model, DENSE, config)
    largest, attend = [[-math.inf] * HEADS for _ in model.attentions], AttentionOverChunks.attend

    def measured(self: AttentionOverChunks, projected: Projected, *args: Any, **kwargs: Any) -> torch.Tensor:
        largest[self.layer] = list(map(max, largest[self.layer], log_sums(projected)))
        return attend(self, projected, *args, **kwargs)

    with patch.object(AttentionOverChunks, "attend", measured):
        take_step(model, optimizer, random_batches(config), config, 1e-2)
    return model, optimizer, largest


def clipped(weight: torch.Tensor, largest: list[float], kv_heads: int) -> torch.Tensor:
    """Scale the rows of a layer's fp64 weight or bias by head."""
    scaled, first, heads = weight.clone(), 0, iter(largest)
    for _ in range(kv_heads):
        for _ in range(HEADS // kv_heads):
            factor = min(1.0, THRESHOLD / next(heads))
            scaled[first : first + SIZE] *= factor if kv_heads < HEADS else factor**0.5
            first += SIZE
        scaled[first : first + SIZE] *= 1.0 if kv_heads < HEADS else factor**0.5
        first += 2 * SIZE
    return scaled


@pytest.mark.parametrize(
    ("kv_heads", "sharded", "train"),
    [
        (2, True, {"optimizer": "muon"}),
        (2, False, {"precision": "bf16", "recompute": "selective"}),
        (HEADS, True, {"precision": "bf16", "recompute": "full"}),
        (HEADS, False, {"optimizer": "muon", "precision": "bf16"}),
        (HEADS, True, {}),
    ],
)
def test_heads_above_the_threshold_are_scaled_after_the_update(
    kv_heads: int, sharded: bool, train: dict[str, Any]
) -> None:
    model, found, largest = stepped(THRESHOLD, kv_heads, train, sharded)
    _, plain, _ = stepped(0.0, kv_heads, train, sharded)
    assert {value > THRESHOLD for of_layer in largest for value in of_layer} == {True, False}
    of_parameter = {
        id(parameter): of_heads
        for attention, of_heads in zip(model.attentions, largest, strict=True)
        for parameter in attention.linear_qkv.parameters()
    }
    for part, before in zip(found.state_parts(), plain.state_parts(), strict=True):
        weight, old = (each.tensors.get("param", each.weight()) for each in (part, before))
        whole = old.double().view(part.parameter.shape)
        if id(part.parameter) in of_parameter:
            whole = clipped(whole, of_parameter[id(part.parameter)], kv_heads)
        changed = whole.flatten() != old.double()
        relative = 1e-2 if "precision" in train else 1e-6  # bf16 rounds the logits
        torch.testing.assert_close(weight[changed].double(), whole.flatten()[changed], rtol=relative, atol=0)
        assert torch.equal(weight[~changed], old[~changed])
        assert torch.equal(part.weight(), weight.to(part.parameter.dtype))
    # On GPUs a rejected update is scaled by 1.
    for applied, smallest in ((True, THRESHOLD / 21), (False, 1.0)):
        found.qk_clip.measure(torch.tensor(applied))
        assert smallest <= found.qk_clip.row_factors.min() < smallest + 0.5
