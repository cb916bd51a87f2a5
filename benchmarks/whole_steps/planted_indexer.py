"""Selections like a trained model's in a model with random weights: its indexers give other projections than their own.

The indexer of random weights selects keys that neighbouring queries do not share, and the time of attention over key
lists grows with the union ratio r. What is planted here takes the place of each indexer's results, at no cost on the
device; gradients go to the indexer's own, so that a step has all of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.mcore.build import Model

LIKENESS = 0.78
"""Of neighbouring queries' indexer inputs. Gives r = 4.5 at 32K tokens and 6.3 at 128K with k = 2048, as the mean over
the layers of a trained model is in results/bench_long_trained.json: 5.7, 5.0, 2.7 and 7.3, 6.9, 3.2."""

TILE = 32
"""Neighbouring queries that are alike: those whose union r is of."""


@dataclass(frozen=True)
class Planted:
    """What one layer's indexer is to give for each sequence."""

    projections: IndexerProjections
    """[1, L, ...]"""
    score_bias: torch.Tensor | None
    weight_bias: torch.Tensor | None
    variance_ema: torch.Tensor | None
    """None: the variance of its own scores, from the first step on."""


def alike(indexer: Indexer, length: int, likeness: float, seed: int) -> Planted:
    """Returns random projections, similar for the queries of a tile.

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

    # Keys wider than the queries: logits of standard deviation 1.5, sigmoids neither flat nor saturated.
    queries, keys, weights = of_queries(heads, dim), 1.5 * normal(1, length, dim), of_queries(heads)
    projections = IndexerProjections(queries, keys.to(weight.dtype), weights)
    return Planted(projections, normal(heads), normal(heads), None)


def exported(path: Path, device: torch.device) -> tuple[int, list[Planted]]:
    """The length, and the layers in order, of a file that launch/export_indexer.py wrote."""
    content = torch.load(path, map_location=device, weights_only=True)
    layers = [
        Planted(
            IndexerProjections(x["queries"], x["keys"], x["weight_logits"]),
            x["score_bias"],
            x["weight_bias"],
            x["variance_ema"].float(),
        )
        for _, x in sorted(content["layers"].items())
    ]
    return int(content["seq_len_tokens"]), layers


def plant(model: Model, layers: Sequence[Planted], batch: int, length: int) -> None:
    """Let the model's indexers give these, layer after layer and from the first again; before it has an optimizer.

    Args:
        layers: of at least `length` tokens; the first `length` are taken
        batch: sequences of a micro-batch, all alike

    Raises:
        ValueError: the projections are not of the model's indexer.
    """
    number = 0
    for attention in model.attentions:
        if attention.indexer is None or attention.variance is None:
            continue
        planted, indexer = layers[number % len(layers)], attention.indexer
        number += 1
        wanted = (indexer.gsa.indexer_heads, indexer.gsa.indexer_dim)
        found = planted.projections.queries
        if tuple(found.shape[2:]) != wanted or found.shape[1] < length:
            raise ValueError(
                f"planted queries are {tuple(found.shape)}; pass [1, {length} or more, {wanted[0]}, {wanted[1]}]"
            )
        dtype = indexer.key_weight.dtype
        given = IndexerProjections(
            *(
                x[:, :length].to(dtype).expand(batch, *x[:, :length].shape[1:]).contiguous()
                for x in planted.projections
            )
        )
        with torch.no_grad():
            for bias, value in (
                (indexer.score_bias, planted.score_bias),
                (indexer.weight_bias, planted.weight_bias),
            ):
                if bias is not None and value is not None:
                    bias.copy_(value)
            if planted.variance_ema is not None:
                attention.variance.ema.copy_(planted.variance_ema)
        indexer.register_forward_hook(_Instead(given))


class _Instead:
    """A forward hook that gives the planted projections with the gradients of the own ones."""

    def __init__(self, given: IndexerProjections) -> None:
        self.given = given

    def __call__(self, module: Any, inputs: Any, own: IndexerProjections) -> IndexerProjections:
        return IndexerProjections(*(_Replace.apply(*pair) for pair in zip(own, self.given, strict=True)))


class _Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.detach()  # a tensor of its own each time, which takes this step's graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
