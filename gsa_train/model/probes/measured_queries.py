"""Compute properties of the measured queries that depend only on the documents. All layers share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gsa_kernels.reference import causal_mask
from gsa_kernels.selection.causal_packed_mask import causal_packed_mask, packed_mask_of_ranges
from gsa_kernels.types import Geometry
from gsa_train.model.probes.query_sample import QuerySample
from gsa_train.model.probes.stats import POSITIONS

LEAST_KEYS = 64
"""Minimum number of causal keys per query in attention-sink statistics. Among few keys, the first always gets a large
share."""


@dataclass(frozen=True)
class SparseQueries:
    """Holds the few queries (`QuerySample.sparse`) that are compared with all their keys."""

    positions: torch.Tensor
    """int64 [T], positions of the queries in the sequence."""
    starts: torch.Tensor
    """int [B, T]: first positions of the queries' documents."""
    num_keys: int
    """L_k: keys up to the chunk's last query."""

    @cached_property
    def counts_in_sink(self) -> torch.Tensor:
        """bool [B, T]"""
        return self.visible >= LEAST_KEYS

    @cached_property
    def number_in_sink(self) -> torch.Tensor:
        """0-d"""
        return self.counts_in_sink.sum()

    @cached_property
    def in_first_document(self) -> torch.Tensor:
        """bool [B, T]: the sequence's first token is one of the query's causal keys."""
        return self.starts == 0

    @cached_property
    def causal(self) -> torch.Tensor:
        """bool [B, T, L_k]: the causal keys of each query."""
        keys = torch.arange(self.num_keys, device=self.starts.device)
        causal = causal_mask(self.num_keys, query_positions=self.positions)
        return causal & (keys >= self.starts[..., None])

    @cached_property
    def causal_packed(self) -> torch.Tensor:
        """`causal` as a packed mask, int32 [B, T, ceil(L_k / 32)]."""
        return causal_packed_mask(self.positions, self.num_keys, self.starts)

    @cached_property
    def visible(self) -> torch.Tensor:
        """Number of causal keys, int64 [B, T]."""
        return self.positions + 1 - self.starts

    @cached_property
    def has_choice(self) -> torch.Tensor:
        """bool [B, T]: the query has at least two causal keys. A single causal key is always selected and has
        probability 1."""
        return self.visible >= 2

    @cached_property
    def causal_with_choice(self) -> torch.Tensor:
        """bool [B, T, L_k]: `causal` for queries with a choice, else False."""
        return self.causal & self.has_choice[..., None]

    @cached_property
    def position_masks(self) -> torch.Tensor:
        """Packed masks of the keys in each range of POSITIONS, int32 [B, ranges, T, ceil(L_k / 32)]. Positions
        count from the start of the query's document."""
        firsts = [self.starts + first for first in POSITIONS if first < self.num_keys]
        bounds = torch.stack([*firsts, torch.full_like(self.starts, self.num_keys)], dim=1)
        return packed_mask_of_ranges(bounds[:, :-1], bounds[:, 1:], self.num_keys)


@dataclass(frozen=True)
class MeasuredQueries:
    """Describes the queries of one chunk. Budget statistics use all queries, other statistics a sample."""

    sample: QuerySample
    geometry: Geometry
    batch: int
    """B"""
    num_keys: int
    """L_k: keys up to the last query."""

    @cached_property
    def visible(self) -> torch.Tensor:
        """Number of causal keys in each query's document: int64 [B, L]."""
        start, starts = self.geometry.query_start, self.geometry.document_starts
        ends = torch.arange(start + 1, self.num_keys + 1, device=self.sample.rows.device)[None]
        return (ends if starts is None else ends - starts).expand(self.batch, -1)

    @cached_property
    def with_choice(self) -> torch.Tensor:
        """bool [B, L]: at least two causal keys."""
        return self.visible >= 2

    @cached_property
    def number_with_choice(self) -> torch.Tensor:
        """0-d"""
        return self.with_choice.sum()

    @cached_property
    def by_position(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Membership of the queries in each group of POSITIONS, bool [groups, B L], and group sizes, int64 [groups]."""
        numbers = torch.arange(len(POSITIONS), device=self.visible.device)  # created on the device: no copy
        groups = torch.bucketize(self.visible - 1, 4 ** numbers[:-1], right=True).flatten()
        members = groups == numbers[:, None]
        return members, members.sum(1)

    @cached_property
    def sampled_visible(self) -> torch.Tensor:
        """`visible` of the sample: [B, S]."""
        return self.visible[:, self.sample.rows]

    @cached_property
    def pairs_in_one_document(self) -> torch.Tensor:
        """bool [B, P]: whether both queries of each pair of neighbours are in one document. If both are, the second
        query has exactly one causal key more than the first. Otherwise, the second query begins a document, and has
        only itself as causal key."""
        visible, pairs = self.sampled_visible, self.sample.neighbours
        return visible[:, pairs + 1] - visible[:, pairs] == 1

    @cached_property
    def groups_in_one_document(self) -> torch.Tensor:
        """bool [B, G]"""
        grouped = self.sample.grouped.view(-1, self.sample.group)
        first, last = self.sampled_visible[:, grouped[:, 0]], self.sampled_visible[:, grouped[:, -1]]
        return last - first == self.sample.group - 1

    @cached_property
    def sparse(self) -> SparseQueries:
        rows, starts = self.sample.sparse, self.geometry.document_starts
        positions = self.geometry.query_start + rows
        of_document = torch.zeros_like(positions).int()[None] if starts is None else starts[:, rows]
        return SparseQueries(positions, of_document.expand(self.batch, -1), self.num_keys)
