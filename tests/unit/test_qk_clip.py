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
from helpers.single_rank import (
    DENSE,
    LeavesOut,
    named_weights,
    random_batches,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)

HEADS, SIZE, THRESHOLD = 4, 4, 12.0
WEIGHTS = ("linear_qkv.weight", "linear_qkv.bias")


def stepped(clip: float, lr: float = 1e-2, detector: Any = None, **sections: Any) -> tuple[Model, Any, Any]:
    """Return a model after a step, its optimizer, and each layer's largest log-sum-exp of each head."""
    train = {"qk_clip": clip, **sections.pop("train", {})}
    model_section = {"qkv_bias": True, "init_std": 0.5, **sections.pop("model", {})}
    config = tiny_config([DENSE], model=model_section, train=train, **sections)
    model = tiny_model(config)
    for name, weight in model.gpt.named_parameters():
        if name.endswith("linear_qkv.bias"):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))
    optimizer = build_optimizer(model, DENSE, config)
    optimizer.start_from_weights()
    largest: dict[int, list[float]] = {}
    attend = AttentionOverChunks.attend

    def measured(self: AttentionOverChunks, projected: Projected, *args: Any, **kwargs: Any) -> torch.Tensor:
        for head, value in enumerate(log_sums(projected)):
            of_layer = largest.setdefault(self.layer, [-math.inf] * HEADS)
            of_layer[head] = max(of_layer[head], value)
        return attend(self, projected, *args, **kwargs)

    with patch.object(AttentionOverChunks, "attend", measured):
        take_step(model, optimizer, random_batches(config), config, lr, detector=detector)
    return model, optimizer, largest


def log_sums(projected: Projected) -> list[float]:
    """Return each head's largest log-sum-exp over the causal keys of a query's document."""
    documents = projected.document_ids
    causal = torch.ones(documents.shape[1], documents.shape[1]).tril().bool()
    allowed = causal & (documents[:, :, None] == documents[:, None, :])
    found = []
    for head in range(HEADS):
        q = projected.q[:, :, head].double()
        k = projected.k[:, :, head * projected.k.shape[2] // HEADS].double()
        logits = (q @ k.mT / SIZE**0.5).masked_fill(~allowed, -math.inf)
        found.append(logits.logsumexp(-1).max().item())
    return found


def clipped(weight: torch.Tensor, largest: list[float], kv_heads: int) -> torch.Tensor:
    """Scale the rows of each head of a layer's fp64 weight or bias."""
    scaled, first = weight.clone(), 0
    for group in range(kv_heads):
        heads = range(group * HEADS // kv_heads, (group + 1) * HEADS // kv_heads)
        for head in heads:
            factor = min(1.0, THRESHOLD / largest[head])
            scaled[first : first + SIZE] *= factor if len(heads) > 1 else factor**0.5
            first += SIZE
        scaled[first : first + SIZE] *= factor**0.5 if len(heads) == 1 else 1.0
        first += 2 * SIZE
    return scaled


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("kv_heads", [2, HEADS])
def test_heads_above_the_threshold_are_scaled_after_the_update(
    kv_heads: int, sharded: bool, precision: str, optimizer: str
) -> None:
    sections: dict[str, Any] = {
        "model": {"num_kv_heads": kv_heads},
        "train": {"precision": precision, "optimizer": optimizer},
        "parallel": {"distributed_optimizer": sharded},
    }
    model, found, largest = stepped(THRESHOLD, **sections)
    _, plain, _ = stepped(0.0, **sections)
    above = [value > THRESHOLD for of_layer in largest.values() for value in of_layer]
    assert True in above
    assert False in above
    names = {id(parameter): name for name, parameter in model.gpt.named_parameters()}
    for part, before in zip(found.state_parts(), plain.state_parts(), strict=True):
        name = names[id(part.parameter)]
        weight, expected = (each.tensors.get("param", each.weight()) for each in (part, before))
        if name.endswith(WEIGHTS):
            layer, whole = int(name.split(".")[2]), expected.double().view(part.parameter.shape)
            scaled = clipped(whole, largest[layer], kv_heads)
            relative = 1e-6 if precision == "fp32" else 1e-2  # bf16 rounds the logits
            torch.testing.assert_close(weight.double().view_as(scaled), scaled, rtol=relative, atol=0)
            unchanged = scaled == whole
            assert torch.equal(weight.view_as(whole)[unchanged], expected.view_as(whole)[unchanged])
        else:
            assert torch.equal(weight, expected), name
        assert torch.equal(part.weight(), weight.to(part.parameter.dtype))


def test_the_next_step_starts_at_the_threshold_and_a_rejected_one_changes_nothing() -> None:
    for sections in ({}, {"train": {"recompute": "full"}}, {"train": {"recompute": "selective"}}):
        model, optimizer, _ = stepped(THRESHOLD, lr=0.0, **sections)
        clip = optimizer.qk_clip
        config = tiny_config([DENSE], train={"qk_clip": THRESHOLD})
        take_step(model, optimizer, random_batches(config), config, 0.0)
        largest = torch.stack([each.over_chunks.largest_log_sums for each in clip.attentions])
        assert largest.max() == pytest.approx(THRESHOLD, abs=0.1)  # 20.6 in the first step
    rejected = LeavesOut(config.monitor, single_rank().device)
    untouched = named_weights(stepped(0.0, lr=0.0)[0])
    for name, weight in named_weights(stepped(THRESHOLD, detector=rejected)[0]).items():
        assert torch.equal(weight, untouched[name])
