"""Builds key lists for benches of kernels. The device builds them in a few passes, without a mask of all pairs."""

import torch

from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import TILE_QUERIES
from gsa_kernels.packed_mask import int32_words


def random_lists(
    batch: int, length: int, k: int, ratio: float, device: torch.device | str, seed: int
) -> KeyLists:
    """Build random lists for a given union ratio. Every query selects k keys, and the queries of a tile together select
    ratio * k different keys.

    The list of a tile has n = ratio * k random keys, which are causal for the first query of the tile. If that query
    has fewer causal keys, the list has all of them. The ratio must be from 1 to the number of queries in a tile. Each
    query selects k evenly spaced keys of the list, or the whole list if n <= k. The queries begin at different offsets
    in the list, so that together they select all of its keys.
    """
    tiles = -(-length // TILE_QUERIES)
    generator = torch.Generator(device=device).manual_seed(seed)
    visible = torch.arange(tiles, device=device).repeat(batch) * TILE_QUERIES + 1
    counts = visible.clamp(max=round(ratio * k))
    starts = counts.cumsum(0) - counts
    entry, tile = _entries(counts, starts)
    count = counts[tile]
    keys = _spread(entry, count, visible[tile], generator)
    chosen = count.clamp(max=k)
    words = torch.zeros_like(entry)
    offset = torch.randint(2**30, (batch * tiles,), generator=generator, device=device)[tile]
    for row in range(TILE_QUERIES):
        phase = row * count // TILE_QUERIES + offset
        words |= ((entry * chosen + phase) % count < chosen).long() << row
    return KeyLists(
        keys=keys,
        words=int32_words(words),
        starts=starts.view(batch, tiles),
        counts=counts.int().view(batch, tiles),
        length=length,
        max_count=int(counts.max()),
        host_counts=counts.cpu().view(batch, tiles),
    )


def _entries(counts: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for every entry its number within its list, and the number of the list."""
    owner = torch.repeat_interleave(counts)
    return torch.arange(len(owner), device=counts.device) - starts[owner], owner


def _spread(
    entry: torch.Tensor, count: torch.Tensor, visible: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw the keys of all lists, int32, ascending in each list. For a list of n keys, the causal keys are divided into
    n equal parts, and entry j of the list is a random key of part j."""
    low, high = entry * visible // count, (entry + 1) * visible // count
    chance = torch.rand(len(entry), generator=generator, device=entry.device)
    return torch.minimum(low + (chance * (high - low)).long(), high - 1).int()
