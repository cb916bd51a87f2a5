"""Key lists per tile (CSR): for each tile of adjacent queries the keys that any selects, with membership words.

The format of the attention and loss kernels for long contexts, where a packed mask takes too much memory.
"""

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
    """The lists turned round, as `find_key_hits` gives them for all tiles in rows of `max_count`: what the indexer loss
    has made, attention's backward pass need not make again."""

    of_all: Any = None
    """(TileRows, KeyHits) of triton_reduce_keys.py."""

    def take(self) -> Any:
        """Once: the memory is free after the backward pass that has it."""
        kept, self.of_all = self.of_all, None
        return kept


@dataclass(frozen=True)
class KeyLists:
    """Tile i of sequence b holds the queries i * queries <= t < (i + 1) * queries; the last tile may be short.

    Entry j of a tile, 0 <= j < counts[b, i], is the key keys[key_starts[b, i] + j]. Every query of the tile
    attends to the first full[b, i] entries. To a later one attend the queries whose bit is set in
    words[word_starts[b, i] + j - full[b, i]]: bit r stands for query i * queries + r.

    A key stands in a tile's list once. The full entries ascend, and so do the masked ones. A word may be 0. Tiles may
    share their keys (one selection per block of queries): then their key_starts are equal.
    """

    keys: torch.Tensor
    """int32 [entries]; what no tile points to is unspecified."""

    words: torch.Tensor
    """int32 [masked entries], a uint32 each: bit 31 makes it negative. Bits of queries beyond L are unspecified."""

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
    """A bound on `counts` that the host knows: what sizes buffers without waiting for the device."""

    query_start: int = 0
    """Position of the first query: query t stands at query_start + t. Keys are their positions."""

    host_counts: torch.Tensor | None = None
    """`counts`, or bounds of them, on the host, where they are known there: buffers then have the size of the lists and
    not of T * max_count entries."""

    kept_hits: KeptHits = field(default_factory=KeptHits, compare=False, repr=False)

    @property
    def num_keys(self) -> int:
        """Lk: the keys up to the last query's own."""
        return self.query_start + self.length


def union_density(lists: KeyLists) -> float:
    """Entries of lists sized by their data over the entries of dense causal attention: the share of a tile's causal
    keys that any of its queries selects."""
    batch, tiles = lists.counts.shape
    ends = lists.query_start + (torch.arange(1, tiles + 1) * lists.queries).clamp(max=lists.length)
    return lists.keys.numel() / (batch * int(ends.sum()))


def key_lists_from_mask(mask: torch.Tensor, queries: int = TILE_QUERIES) -> KeyLists:
    """The definition of the format, in plain torch: bool [B, L, Lk] -> lists without a full part.

    The queries are the last L of Lk positions. Loops over the tiles: for tests.
    """
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
    """bool [B, L, Lk], the inverse of `key_lists_from_mask`. Loops over the tiles: for tests.

    Raises:
        ValueError: a tile names a key twice.
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
