"""The indexer loss over all layers that use one selection (`gsa.reuse_teacher: group`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gsa_train.distributed.context_sharding import QueryChunk
from gsa_train.model.indexer import Indexer, IndexerProjections


class TargetSum:
    """Attention probabilities of a query chunk, summed over the heads of the group's layers so far."""

    def __init__(self) -> None:
        self.probs: torch.Tensor | None = None

    def add(self, probs: torch.Tensor) -> torch.Tensor:
        """Add a layer's probabilities [B, L, L_k], detached, and return the sum over the layers so far."""
        self.probs = probs if self.probs is None else self.probs + probs
        return self.probs


@dataclass
class GroupTarget:
    """Target of a group's indexer loss, accumulated from the first layer, which has the indexer, to the last."""

    indexer: Indexer
    indexed: IndexerProjections
    """With the autograd graph of the loss."""
    layer: int
    """Index of the group's first layer, for which the loss is recorded."""
    sums: dict[int, TargetSum] = field(default_factory=dict)
    """Start of a query chunk -> its sum."""

    def sum_of(self, chunk: QueryChunk) -> TargetSum:
        return self.sums.setdefault(chunk.start, TargetSum())
