"""What a layer's attention is made of, cut into the chunks of queries that this rank holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gsa_data.pack import document_starts
from gsa_kernels.types import Geometry
from gsa_train.config import GSAConfig
from gsa_train.context_sharding import QueryChunk


class IndexerProjections(NamedTuple):
    """What the indexer makes of the hidden states, batch first."""

    queries: torch.Tensor
    """[B, L, H_I, d_I]"""
    keys: torch.Tensor
    """[B, L, d_I], one key for all indexer heads"""
    head_weight_logits: torch.Tensor
    """[B, L, H_I]"""

    def of(self, chunk: QueryChunk) -> IndexerProjections:
        """The chunk's queries, and the keys up to its end: those here are of all tokens."""
        return IndexerProjections(
            self.queries[:, chunk.local], self.keys[:, : chunk.end], self.head_weight_logits[:, chunk.local]
        )


class Projected(NamedTuple):
    """Tensors alone, as a checkpoint takes and keeps them."""

    q: torch.Tensor
    """[B, L, n_h, d_k], rotated, of this rank's tokens."""
    k: torch.Tensor
    v: torch.Tensor
    """[B, L, n_kv, d_k], K rotated and V gated by G2."""
    output_gate: torch.Tensor | None
    """Logits of G1 [B, L, n_kv, n_h / n_kv, d_k]; None without this gate."""
    document_ids: torch.Tensor | None
    """int32, of all tokens of the sequence; None for one document per sequence."""
    queries: torch.Tensor | None
    keys: torch.Tensor | None
    head_weight_logits: torch.Tensor | None
    """Of the indexer, as `IndexerProjections` has them; None where it does not run."""

    @property
    def indexed(self) -> IndexerProjections | None:
        if self.queries is None:
            return None
        assert self.keys is not None
        assert self.head_weight_logits is not None
        return IndexerProjections(self.queries, self.keys, self.head_weight_logits)


def chunk_geometry(document_ids: torch.Tensor | None, chunk: QueryChunk, gsa: GSAConfig) -> Geometry:
    """Where a chunk's queries stand, and what they see.

    Args:
        document_ids: of all tokens of the sequence.
    """
    starts = None if document_ids is None else document_starts(document_ids[:, : chunk.end], chunk.start)
    return Geometry(starts, chunk.start, gsa.selection_block, gsa.local_window)
