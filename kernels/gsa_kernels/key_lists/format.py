"""Defines key lists (CSR). For each tile of adjacent queries, a key list holds every key that at least one query of the
tile selects. With each key, the list holds a word, whose bits say which of the queries select this key. The attention
and loss kernels use this format if queries select few of many keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from gsa_kernels.checks import check_at_least, check_mask
from gsa_kernels.limits import TILE_QUERIES
from gsa_kernels.packed_mask import int32_words


@dataclass(frozen=True)
class HostCounts:
    """Holds the numbers of keys per tile on the host, to which the device may still be copying them."""

    counts: torch.Tensor
    """int32 [B, T]"""

    copied: torch.cuda.Event | None = None
    """Occurs when the copy is complete. None if it already is."""

    def read(self) -> torch.Tensor:
        """Wait for the copy, and return the counts."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.counts

    @cached_property
    def largest(self) -> int:
        return int(self.read().max())


@dataclass(frozen=True)
class KeyLists:
    """Holds the lists. Tile i of sequence b consists of TILE_QUERIES queries, from query i * TILE_QUERIES on. The last
    tile may have fewer queries.

    Tile i of sequence b has counts[b, i] entries. Entry j of the tile is the key `keys[starts[b, i] + j]`, and bit r of
    `words[starts[b, i] + j]` says whether query i * TILE_QUERIES + r attends to this key. In the list of a tile, keys
    ascend, and each key occurs once. A word may be 0.
    """

    keys: torch.Tensor
    """int32 [entries]; entries that belong to no tile are unspecified."""

    words: torch.Tensor
    """int32 [entries], each holding a uint32. Bits of queries at or beyond L are unspecified."""

    starts: torch.Tensor
    """int64 [B, T]"""

    counts: torch.Tensor
    """int32 [B, T]"""

    length: int
    """L: queries of a sequence."""

    host_counts: HostCounts
    """`counts`, or upper bounds on them, on the host, for the sizes of buffers. If the lists are of only a chunk of the
    tiles, these are the counts of all tiles."""

    query_start: int = 0
    """Position of the first query. A key's number is its position."""

    @property
    def max_count(self) -> int:
        """Return an upper bound on `counts`. The host may have to wait for it."""
        return self.host_counts.largest

    @property
    def num_keys(self) -> int:
        """Return Lk: the number of keys up to the last query."""
        return self.query_start + self.length

    def density(self) -> torch.Tensor:
        """Return the number of list entries, divided by the number in lists of all causal keys. 0-d."""
        batch, tiles = self.counts.shape
        ends = self.query_start + (torch.arange(1, tiles + 1) * TILE_QUERIES).clamp(max=self.length)
        return self.counts.sum() / (batch * int(ends.sum()))


def key_lists_from_mask(mask: torch.Tensor) -> KeyLists:
    """Build lists from bool [B, L, Lk], for queries at the last L of the Lk positions. This plain torch code defines
    the format."""
    batch, length, num_keys = mask.shape
    check_mask("mask", mask, batch, length, max(num_keys, length))
    check_at_least("L", length, 1)
    tiles = -(-length // TILE_QUERIES)
    padded = torch.nn.functional.pad(mask, (0, 0, 0, tiles * TILE_QUERIES - length))
    bits = 1 << torch.arange(TILE_QUERIES, dtype=torch.int64, device=mask.device)
    sums = (padded.unflatten(1, (tiles, TILE_QUERIES)).to(torch.int64) * bits[:, None]).sum(2)  # [B, T, Lk]
    words = int32_words(sums)
    hits = words != 0
    counts = hits.sum(-1, dtype=torch.int32)
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(batch, tiles)
    return KeyLists(
        keys=torch.arange(num_keys, dtype=torch.int32, device=mask.device).expand_as(hits)[hits],
        words=words[hits],
        starts=starts,
        counts=counts,
        length=length,
        host_counts=HostCounts(counts.cpu()),
        query_start=num_keys - length,
    )


def mask_from_key_lists(lists: KeyLists) -> torch.Tensor:
    """Return bool [B, L, Lk], the inverse of `key_lists_from_mask`. The code loops over the tiles.

    Raises:
        ValueError: a tile lists a key twice.
    """
    batch, tiles = lists.counts.shape
    mask = torch.zeros(
        batch, tiles * TILE_QUERIES, lists.num_keys, dtype=torch.bool, device=lists.keys.device
    )
    rows = torch.arange(TILE_QUERIES, dtype=torch.int32, device=lists.keys.device)
    for b, tile in product(range(batch), range(tiles)):
        start, count = int(lists.starts[b, tile]), int(lists.counts[b, tile])
        keys = lists.keys[start : start + count].long()
        if keys.unique().numel() != count:
            raise ValueError(f"tile {tile} of sequence {b} names a key twice")
        hits = ((lists.words[None, start : start + count] >> rows[:, None]) & 1).bool()
        mask[b, tile * TILE_QUERIES : (tile + 1) * TILE_QUERIES, keys] = hits
    return mask[:, : lists.length]
