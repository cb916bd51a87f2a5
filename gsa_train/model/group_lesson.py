"""One indexer taught by all layers that use its selection: `gsa.reuse_teacher: group`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gsa_train.distributed.context_sharding import QueryChunk
from gsa_train.model.indexer import Indexer, IndexerProjections


class TargetSum:
    """Attention probabilities of some queries, added up over the heads of a group's layers so far."""

    def __init__(self) -> None:
        self.probs: torch.Tensor | None = None

    def add(self, probs: torch.Tensor) -> torch.Tensor:
        """[B, L, L_k] of a layer, without graph -> the sum over the layers so far."""
        self.probs = probs if self.probs is None else self.probs + probs
        return self.probs


@dataclass
class GroupLesson:
    """Kept from a group's first layer, which has the indexer, to its last one, which calculates the indexer loss."""

    indexer: Indexer
    indexed: IndexerProjections
    """With the graph that the loss differentiates."""
    layer: int
    """The first one, to which the loss belongs."""
    sums: dict[int, TargetSum] = field(default_factory=dict)
    """By the start of a chunk of queries."""

    def sum_of(self, chunk: QueryChunk) -> TargetSum:
        return self.sums.setdefault(chunk.start, TargetSum())
