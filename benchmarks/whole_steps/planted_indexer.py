"""Gives a model with random weights selections like a trained model's, by replacing its indexers' projections.

With random weights, neighbouring queries select different keys. The time of attention over key lists grows with the
union ratio r (the keys that any of 32 neighbouring queries selects, divided by the keys of one query). Planted
projections replace each indexer's results at no cost on the device. Gradients still reach the indexer's own
projections, so that a step does all of its work.
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
"""Similarity of neighbouring queries' indexer inputs. With k = 2048 it gives about the mean r over the layers of the
trained model in results/bench_long_trained.json, at 32K and at 128K tokens."""

TILE = 32
"""Number of neighbouring queries that are similar: the queries whose union defines r."""


@dataclass(frozen=True)
class Planted:
    """Holds what one layer's indexer returns for each sequence."""

    projections: IndexerProjections
    """[1, L, ...]"""
    score_bias: torch.Tensor | None
    weight_bias: torch.Tensor | None
    variance_ema: torch.Tensor | None
    """None: the variance of its own scores, from the first step on."""


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

    # Keys have a larger scale than queries: logits have a standard deviation of 1.5, and sigmoids do not saturate.
    queries, keys, weights = of_queries(heads, dim), 1.5 * normal(1, length, dim), of_queries(heads)
    projections = IndexerProjections(queries, keys.to(weight.dtype), weights)
    return Planted(projections, normal(heads), normal(heads), None)


def exported(path: Path, device: torch.device) -> tuple[int, list[Planted]]:
    """Return the length and the layers, in order, from a file of launch/export_indexer.py."""
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
    """Plant projections in the model's indexers, layer by layer, cyclically; call this before the optimizer is built.

    Args:
        layers: have at least `length` tokens; the first `length` are used
        batch: sequences of a micro-batch, which are all equal

    Raises:
        ValueError: the projections do not fit the model's indexer.
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
    """Implements a forward hook that returns the planted projections with the gradients of the indexer's own."""

    def __init__(self, given: IndexerProjections) -> None:
        self.given = given

    def __call__(self, module: Any, inputs: Any, own: IndexerProjections) -> IndexerProjections:
        return IndexerProjections(*(_Replace.apply(*pair) for pair in zip(own, self.given, strict=True)))


class _Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.detach()  # a new tensor each time, for this step's graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
