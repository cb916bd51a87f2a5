"""Builds key lists to time kernels with, on the device in a few passes, without a mask of all pairs."""

import torch

from gsa_kernels.key_lists.format import KeyLists


def random_lists(
    batch: int,
    length: int,
    k: int,
    ratio: float,
    device: torch.device | str,
    seed: int,
    queries: int = 32,
) -> KeyLists:
    """Build lists in which every query selects k keys, and the queries of a tile together ratio * k.

    A tile lists n = ratio * k random causal keys of its first query, or all of them if there are fewer. The ratio must
    be from 1 to the number of queries in a tile. Each query selects exactly k of the n keys, evenly spaced. The offsets
    of the queries differ so that each key is selected.
    """
    tiles = -(-length // queries)
    generator = torch.Generator(device=device).manual_seed(seed)
    visible = torch.arange(tiles, device=device).repeat(batch) * queries + 1
    counts = visible.clamp(max=round(ratio * k))
    starts = counts.cumsum(0) - counts
    entry, tile = _entries(counts, starts)
    count = counts[tile]
    keys = _spread(entry, count, visible[tile], generator)
    chosen = count.clamp(max=k)
    words = torch.zeros_like(entry)
    offset = torch.randint(2**30, (batch * tiles,), generator=generator, device=device)[tile]
    for row in range(queries):
        phase = row * count // queries + offset
        words |= ((entry * chosen + phase) % count < chosen).long() << row
    return KeyLists(
        keys=keys,
        words=_as_int32(words),
        key_starts=starts.view(batch, tiles),
        word_starts=starts.view(batch, tiles),
        full=torch.zeros(batch, tiles, dtype=torch.int32, device=device),
        counts=counts.int().view(batch, tiles),
        queries=queries,
        length=length,
        max_count=int(counts.max()),
        host_counts=counts.cpu().view(batch, tiles),
    )


def block_lists(
    batch: int,
    length: int,
    k: int,
    block: int,
    window: int,
    device: torch.device | str,
    seed: int,
    queries: int = 32,
) -> KeyLists:
    """Build one selection per block of queries: k random keys before the window of the block's first query.

    These keys are the full part. The last `window` keys of each query follow with their words. The tiles of a block
    share their keys. `block` is a multiple of `queries`; `window` is at least `block`.
    """
    if block % queries != 0 or window < block:
        raise ValueError(
            f"block {block}, window {window}: pass a multiple of {queries}, and a window >= block"
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = -(-length // block)
    first = torch.arange(blocks, device=device).repeat(batch) * block
    before = (first - window + 1).clamp(min=0)
    chosen = before.clamp(max=k)
    block_counts = chosen + (first + block).clamp(max=length) - before
    block_starts = block_counts.cumsum(0) - block_counts
    entry, owner = _entries(block_counts, block_starts)
    in_window = entry >= chosen[owner]
    drawn = _spread(entry, chosen[owner].clamp(min=1), before[owner], generator)
    keys = torch.where(in_window, before[owner] + entry - chosen[owner], drawn)

    tiles = -(-length // queries)
    tile_first = torch.arange(tiles, device=device).repeat(batch) * queries
    sequence = torch.arange(batch, device=device).repeat_interleave(tiles)
    of_tile = sequence * blocks + tile_first // block
    masked = (tile_first + queries).clamp(max=length) - before[of_tile]
    word_starts = masked.cumsum(0) - masked
    entry, tile = _entries(masked, word_starts)
    key = before[of_tile[tile]] + entry
    # Row r attends to the key if key <= first + r < key + window.
    low = (key - tile_first[tile]).clamp(min=0)
    high = (key + window - tile_first[tile]).clamp(min=0, max=queries)
    words = ((1 << high) - 1) & ~((1 << low) - 1)
    counts = chosen[of_tile] + masked
    return KeyLists(
        keys=keys.int(),
        words=_as_int32(words),
        key_starts=block_starts[of_tile].view(batch, tiles),
        word_starts=word_starts.view(batch, tiles),
        full=chosen[of_tile].int().view(batch, tiles),
        counts=counts.int().view(batch, tiles),
        queries=queries,
        length=length,
        max_count=int(counts.max()),
    )


def _entries(counts: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number within its list, and the list, of every entry of all lists."""
    owner = torch.repeat_interleave(counts)
    return torch.arange(len(owner), device=counts.device) - starts[owner], owner


def _spread(
    entry: torch.Tensor, count: torch.Tensor, visible: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw entry j of n: a random key of the j-th of n equal parts of the causal keys. int32, ascending."""
    low, high = entry * visible // count, (entry + 1) * visible // count
    chance = torch.rand(len(entry), generator=generator, device=entry.device)
    return torch.minimum(low + (chance * (high - low)).long(), high - 1).int()


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).int()
