"""The statistics of `reference.py` on selections as key lists, without an L x L mask and without bits of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gsa_kernels.lists.key_lists import KeyLists

_ENTRIES_PER_STEP = 2**20  # bounds the temporaries: 32 bits of each as int32 are 128 MiB


def selected_per_row(lists: KeyLists) -> torch.Tensor:
    """|S_t|: int64 [B, L]."""
    batch, tiles = lists.counts.shape
    sizes = lists.words.new_zeros(batch * tiles, lists.queries)
    for entries in _masked_entries(lists):
        sizes.index_add_(0, entries.tile, _bits(entries.words, lists.queries))
    rows = sizes.view(batch, tiles, lists.queries).long() + lists.full[..., None]
    return rows.flatten(1)[:, : lists.length]


def adjacent_overlap_of_lists(lists: KeyLists) -> torch.Tensor:
    """Mean over t >= 1 of |S_t & S_{t-1}| / |S_t|; queries that select nothing are left out. 0-d fp32."""
    batch, tiles = lists.counts.shape
    queries = lists.queries
    shared = lists.words.new_zeros(batch * tiles, queries)
    for entries in _masked_entries(lists):
        shared.index_add_(0, entries.tile, _bits(entries.words & (entries.words << 1), queries))
    shared = shared.view(batch, tiles, queries).long() + lists.full[..., None]
    shared[..., 0] = _shared_with_tile_before(lists)
    ratio = shared.flatten(1)[:, : lists.length]
    return _mean_ratio(ratio[:, 1:], selected_per_row(lists)[:, 1:].float())


def union_ratio_of_lists(lists: KeyLists, group: int = 32) -> torch.Tensor:
    """Mean over aligned groups of |union of S_t in the group| / mean |S_t|; a short last group is left out,
    unless it is the only one. 0-d fp32.

    Args:
        group: a multiple of the lists' queries per tile
    """
    if group < 1 or group % lists.queries:
        raise ValueError(f"group is {group}; pass a multiple of {lists.queries}, the queries of a tile")
    whole = max(lists.length // group, 1)
    rows = min(lists.length, group)
    sizes = selected_per_row(lists)[:, : whole * rows].unflatten(1, (whole, rows))
    return _mean_ratio(_union_sizes(lists, group)[:, :whole], sizes.float().mean(-1))


def selects_key_zero(lists: KeyLists) -> torch.Tensor:
    """bool [B, L]: whether query t selects key 0."""
    # Both parts of a list ascend: key 0 is the first of one of them, if it is there.
    has_full, has_masked = lists.full > 0, lists.counts > lists.full
    of_all = has_full & (_at(lists.keys, lists.key_starts, has_full) == 0)
    listed = has_masked & (_at(lists.keys, lists.key_starts + lists.full, has_masked) == 0)
    words = torch.where(listed, _at(lists.words, lists.word_starts, has_masked), 0)
    bits = _bits(words.flatten(), lists.queries).bool().view(*words.shape, lists.queries)
    return (bits | of_all[..., None]).flatten(1)[:, : lists.length]


def _at(values: torch.Tensor, index: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """values[index] where valid, something else where not."""
    if values.numel() == 0:
        return torch.zeros_like(index, dtype=values.dtype)
    return values[torch.where(valid, index, 0)]


def _union_sizes(lists: KeyLists, group: int) -> torch.Tensor:
    """|union of S_t| of every aligned group of queries, int64 [B, groups]."""
    batch, tiles = lists.counts.shape
    groups = -(-tiles * lists.queries // group)
    pairs = _selected_pairs(lists, lambda entries: _by_any(lists, entries))
    tile, key = pairs // lists.num_keys, pairs % lists.num_keys
    of_group = tile // tiles * groups + tile % tiles * lists.queries // group
    if group > lists.queries:  # else no pair comes twice
        of_group = (of_group * lists.num_keys + key).unique() // lists.num_keys
    return torch.bincount(of_group, minlength=batch * groups).view(batch, groups)


def _by_any(lists: KeyLists, entries: _Entries) -> torch.Tensor:
    """bool [E]: whether a query selects the key. Bits of queries beyond L are unspecified and do not count."""
    tile = entries.tile % lists.counts.shape[1]
    real = (lists.length - tile * lists.queries).clamp(max=lists.queries)
    bits = entries.words.long() & ((1 << real) - 1)
    return bits != 0


@dataclass(frozen=True)
class _Entries:
    words: torch.Tensor  # int32 [E]
    keys: torch.Tensor  # int32 [E]
    tile: torch.Tensor  # int64 [E], b * T + tile


def _masked_entries(lists: KeyLists) -> Iterator[_Entries]:
    """The entries of the masked parts, tile by tile, in steps; their number is read on the host."""
    full, sizes = lists.full.flatten(), (lists.counts - lists.full).flatten().long()
    ends = sizes.cumsum(0)
    key_starts, word_starts = lists.key_starts.flatten() + full, lists.word_starts.flatten()
    total = int(ends[-1])
    for start in range(0, total, _ENTRIES_PER_STEP):
        entry = torch.arange(start, min(start + _ENTRIES_PER_STEP, total), device=ends.device)
        tile = torch.searchsorted(ends, entry, right=True)
        within = entry - (ends[tile] - sizes[tile])
        yield _Entries(lists.words[word_starts[tile] + within], lists.keys[key_starts[tile] + within], tile)


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [E, count]: the lowest bits."""
    return (words[:, None] >> torch.arange(count, dtype=torch.int32, device=words.device)) & 1


def _shared_with_tile_before(lists: KeyLists) -> torch.Tensor:
    """|S_t & S_{t-1}| of the first query of every tile, int64 [B, T]; the first tile's is 0."""
    batch, tiles = lists.counts.shape
    of_first = _selected_pairs(lists, lambda entries: _has_bit(entries, 0))
    of_last = _selected_pairs(lists, lambda entries: _has_bit(entries, lists.queries - 1))
    tile = of_first // lists.num_keys
    met = torch.isin(of_first - lists.num_keys, of_last) & (tile % tiles > 0)
    return torch.bincount(tile[met], minlength=batch * tiles).view(batch, tiles)


def _has_bit(entries: _Entries, row: int) -> torch.Tensor:
    return ((entries.words >> row) & 1).bool()


def _selected_pairs(lists: KeyLists, chosen: Callable[[_Entries], torch.Tensor]) -> torch.Tensor:
    """(b * T + tile) * Lk + key of the keys of full parts, and of the entries that are `chosen`: int64."""
    pairs = [
        (entries.tile * lists.num_keys + entries.keys)[chosen(entries)] for entries in _masked_entries(lists)
    ]
    full = lists.full.flatten().long()
    tile = torch.repeat_interleave(full)
    within = torch.arange(tile.numel(), device=tile.device) - (full.cumsum(0) - full)[tile]
    pairs.append(tile * lists.num_keys + lists.keys[lists.key_starts.flatten()[tile] + within])
    return torch.cat(pairs)


def _mean_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Mean of numerator / denominator where the denominator is positive; 0 if it never is."""
    counted = denominator > 0
    ratio = torch.where(counted, numerator / denominator.clamp(min=1e-9), 0)
    return ratio.sum() / counted.sum().clamp(min=1)
