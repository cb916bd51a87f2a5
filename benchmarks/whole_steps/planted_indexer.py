"""Gives a model with random weights the selections of a trained model, by replacing its indexers' projections.

In a trained model, neighbouring queries select similar keys. With random weights, they do not. Attention over key lists
takes longer with a larger union ratio r: the number of keys that at least one of 32 neighbouring queries selects,
divided by the number of keys that one query selects. This module therefore makes each indexer return fixed ("planted")
projections. The replacement takes no device time. Gradients still reach the indexer's own projections, so that a step
does all of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.mcore.build import Model

LIKENESS = 0.96
"""Similarity of neighbouring queries' indexer inputs. With 1024 keys, the union ratio r is then 2.1 at 8192 tokens and
2.7 at 32,768. In the trained SmolLM2-135M (commit 90c6ac39), r is 2.14 and 2.83."""

TILE = 32
"""Number of neighbouring queries that are similar: the queries whose union defines r."""


@dataclass(frozen=True)
class Planted:
    """Holds what one layer's indexer returns for each sequence."""

    projections: IndexerProjections
    """[1, L, ...]"""
    score_bias: torch.Tensor
    weight_bias: torch.Tensor


def alike(indexer: Indexer, length: int, likeness: float, seed: int) -> Planted:
    """Return random projections that are similar for the queries of a tile.

    Args:
        likeness: 0, independent, to 1, equal
    """
    heads, dim = indexer.gsa.indexer_heads, indexer.gsa.indexer_dim
    weight = indexer.key_weight
    generator = torch.Generator(weight.device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device)

    def of_queries(*inner: int) -> torch.Tensor:
        own, shared = normal(1, length, *inner), normal(1, -(-length // TILE), *inner)
        of_tile = shared.repeat_interleave(TILE, 1)[:, :length]
        return (likeness**0.5 * of_tile + (1 - likeness) ** 0.5 * own).to(weight.dtype)

    # The keys' scale of 1.5 gives logits a standard deviation of 1.5, with which sigmoids do not saturate.
    queries, keys, weights = of_queries(heads, dim), 1.5 * normal(1, length, dim), of_queries(heads)
    projections = IndexerProjections(queries, keys.to(weight.dtype), weights)
    return Planted(projections, normal(heads), normal(heads))


def plant(model: Model, layers: Sequence[Planted], batch: int) -> None:
    """Plant projections in the model's indexers, layer by layer. Call this before the optimizer is built.

    Args:
        batch: sequences of a micro-batch, which are all equal
    """
    indexers = [each.indexer for each in model.attentions if each.indexer is not None]
    for indexer, planted in zip(indexers, layers, strict=True):
        biases = (indexer.score_bias, planted.score_bias), (indexer.weight_bias, planted.weight_bias)
        with torch.no_grad():
            for bias, value in biases:
                if bias is not None:
                    bias.copy_(value)
        given = [x.expand(batch, *x.shape[1:]).contiguous() for x in planted.projections]
        indexer.register_forward_hook(partial(_planted_instead, given))


def _planted_instead(given: list[torch.Tensor], module: Any, inputs: Any, own: Any) -> IndexerProjections:
    """Return the planted projections with the gradients of the indexer's own."""
    return IndexerProjections(*(_Replace.apply(*pair) for pair in zip(own, given, strict=True)))


class _Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.detach()  # a new tensor each time, for this step's graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
