"""Creates selections as masks, and as key lists that use all features of the format."""

import torch

from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists


def lists_of(mask: torch.Tensor, queries: int, share: int, seed: int = 0) -> KeyLists:
    """Return lists with a full part, `share` tiles with the same keys, gaps, and random bits beyond L."""
    rng = torch.Generator().manual_seed(seed)
    batch, length, num_keys = mask.shape
    tiles = -(-length // queries)
    keys: list[torch.Tensor] = []
    words: list[torch.Tensor] = []
    numbers = torch.zeros(4, batch, tiles, dtype=torch.int64)  # for key_starts, word_starts, full, counts
    junk = torch.full((3,), 2**31 - 1)
    padded = torch.nn.functional.pad(mask.cpu(), (0, 0, 0, tiles * queries - length)).long()
    unspecified = torch.arange(tiles * queries).view(tiles, queries) >= length
    for b in range(batch):
        for tile in range(tiles):
            bits = padded[b, tile * queries : (tile + 1) * queries]
            if tile % share == 0:
                rows = mask[b, tile * queries : (tile + share) * queries].cpu()
                full, some = rows.all(0), rows.any(0) & ~rows.all(0)
                full_keys, some_keys = full.nonzero()[:, 0], some.nonzero()[:, 0]
                keys += [full_keys, some_keys, junk]
                start = sum(map(len, keys)) - len(full_keys) - len(some_keys) - len(junk)
            bits = bits[:, some_keys] | (
                torch.randint(2, (queries, len(some_keys)), generator=rng) & unspecified[tile][:, None]
            )
            word = (bits << torch.arange(queries)[:, None]).sum(0)
            # Keys that no later query of the tile selects may be missing in its list, as in a block's first tiles.
            used = (
                int((word != 0).nonzero().max()) + 1 if share > 1 and bool((word != 0).any()) else len(word)
            )
            numbers[:, b, tile] = torch.tensor(
                [start, sum(map(len, words)), len(full_keys), len(full_keys) + used]
            )
            words += [word[:used], junk]
    device = mask.device
    lists = KeyLists(
        keys=torch.cat(keys).to(device, torch.int32),
        words=torch.where(torch.cat(words) >= 2**31, torch.cat(words) - 2**32, torch.cat(words)).to(
            device, torch.int32
        ),
        key_starts=numbers[0].to(device),
        word_starts=numbers[1].to(device),
        full=numbers[2].to(device, torch.int32),
        counts=numbers[3].to(device, torch.int32),
        queries=queries,
        length=length,
        max_count=int(numbers[3].max()) + 5,
        query_start=num_keys - length,
    )
    assert torch.equal(mask_from_key_lists(lists), mask)
    return lists


def make_mask(length: int, batch: int, block: int, window: int, documents: bool, seed: int) -> torch.Tensor:
    """Return bool [B, L, L]: the queries of a block share random keys, and each selects its window and itself."""
    rng = torch.Generator().manual_seed(seed)
    position = torch.arange(length)
    visible = (position[None, :] <= position[:, None]).expand(batch, length, length)
    if documents:
        ids = (torch.rand(batch, length, generator=rng) < 0.04).cumsum(1)
        visible = visible & (ids[:, :, None] == ids[:, None, :])
    chosen = torch.rand(batch, length, length, generator=rng) < 0.4
    leader = position // block * block
    chosen = chosen[:, leader] & visible[:, leader]
    return (chosen | (position[:, None] - position[None, :] < window)) & visible
