"""Defines key lists (CSR): for each tile of adjacent queries, the keys that any of them selects, with membership words.
The attention and loss kernels use this format for long sequences, whose packed mask would take too much memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from gsa_kernels.checks import check_at_least, check_mask
from gsa_kernels.limits import TILE_QUERIES, TILE_SIZES
from gsa_kernels.packed_mask import int32_words


@dataclass
class KeptHits:
    """Keeps the transposed key lists, which name for each key the list entries that hold it. `find_key_hits` computes
    them for all tiles in the indexer loss. The backward pass of attention then uses them again."""

    of_all: Any = None
    """(TileRows, KeyHits) of triton_reduce_keys.py."""

    def take(self) -> Any:
        """Return them once; the memory is free after the backward pass that takes them."""
        kept, self.of_all = self.of_all, None
        return kept


@dataclass(frozen=True)
class KeyLists:
    """Holds the lists. Tile i of sequence b has the queries i * queries <= t < (i + 1) * queries; the last may be
    short.

    Entry j of a tile, 0 <= j < counts[b, i], is the key keys[key_starts[b, i] + j]. Every query of the tile attends to
    the first full[b, i] entries. Later entries are masked: a query attends to entry j if its bit is set in
    words[word_starts[b, i] + j - full[b, i]]. Bit r belongs to query i * queries + r.

    A key occurs once in a tile's list. The full entries ascend, and so do the masked entries. A word may be 0. If a
    block of queries shares one selection, its tiles share their keys and have equal key_starts.
    """

    keys: torch.Tensor
    """int32 [entries]; entries that belong to no tile are unspecified."""

    words: torch.Tensor
    """int32 [masked entries], each holding a uint32. Bits of queries at or beyond L are unspecified."""

    key_starts: torch.Tensor
    """int64 [B, T]"""

    word_starts: torch.Tensor
    """int64 [B, T]"""

    full: torch.Tensor
    """int32 [B, T]"""

    counts: torch.Tensor
    """int32 [B, T], at least `full`."""

    queries: int
    """Queries per tile, 16 or 32."""

    length: int
    """L: queries of a sequence."""

    max_count: int
    """An upper bound on `counts` that the host knows, so that it can size buffers without waiting for the device."""

    query_start: int = 0
    """Position of the first query: query t is at position query_start + t. A key's number is its position."""

    host_counts: torch.Tensor | None = None
    """`counts`, or bounds of them, on the host, where they are known there: buffers then have the size of the lists and
    not of T * max_count entries."""

    kept_hits: KeptHits = field(default_factory=KeptHits, compare=False, repr=False)

    @property
    def num_keys(self) -> int:
        """Return Lk: the number of keys up to the last query."""
        return self.query_start + self.length


def union_density(lists: KeyLists) -> float:
    """Divide the entries of the lists by the entries that lists of all causal keys would have."""
    batch, tiles = lists.counts.shape
    ends = lists.query_start + (torch.arange(1, tiles + 1) * lists.queries).clamp(max=lists.length)
    return lists.keys.numel() / (batch * int(ends.sum()))


def key_lists_from_mask(mask: torch.Tensor, queries: int = TILE_QUERIES) -> KeyLists:
    """Build lists from bool [B, L, Lk] without a full part. This plain torch code defines the format. The queries are
    the last L of Lk positions. The code loops over the tiles and is only for tests."""
    batch, length, num_keys = mask.shape
    check_mask("mask", mask, batch, length, max(num_keys, length))
    if queries not in TILE_SIZES:
        raise ValueError(f"queries is {queries}; pass one of {TILE_SIZES}")
    check_at_least("L", length, 1)
    tiles = -(-length // queries)
    padded = torch.nn.functional.pad(mask, (0, 0, 0, tiles * queries - length))
    bits = 1 << torch.arange(queries, dtype=torch.int64, device=mask.device)
    sums = (padded.unflatten(1, (tiles, queries)).to(torch.int64) * bits[:, None]).sum(2)  # [B, T, Lk]
    words = int32_words(sums)
    hits = words != 0
    counts = hits.sum(-1)
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(batch, tiles)
    return KeyLists(
        keys=torch.arange(num_keys, dtype=torch.int32, device=mask.device).expand_as(hits)[hits],
        words=words[hits],
        key_starts=starts,
        word_starts=starts,
        full=torch.zeros_like(counts, dtype=torch.int32),
        counts=counts.to(torch.int32),
        queries=queries,
        length=length,
        max_count=int(counts.max()),
        query_start=num_keys - length,
    )


def mask_from_key_lists(lists: KeyLists) -> torch.Tensor:
    """Return bool [B, L, Lk], the inverse of `key_lists_from_mask`. The code loops over the tiles and is only for
    tests.

    Raises:
        ValueError: a tile lists a key twice.
    """
    batch, tiles = lists.counts.shape
    length, queries = lists.length, lists.queries
    mask = torch.zeros(batch, tiles * queries, lists.num_keys, dtype=torch.bool, device=lists.keys.device)
    rows = torch.arange(queries, dtype=torch.int32, device=lists.keys.device)
    for b, tile in product(range(batch), range(tiles)):
        count, full = int(lists.counts[b, tile]), int(lists.full[b, tile])
        start, word_start = int(lists.key_starts[b, tile]), int(lists.word_starts[b, tile])
        keys = lists.keys[start : start + count].long()
        if keys.unique().numel() != count:
            raise ValueError(f"tile {tile} of sequence {b} names a key twice")
        hits = torch.ones(queries, count, dtype=torch.bool, device=rows.device)
        hits[:, full:] = (
            (lists.words[None, word_start : word_start + count - full] >> rows[:, None]) & 1
        ).bool()
        mask[b, tile * queries : (tile + 1) * queries, keys] = hits
    return mask[:, :length]
