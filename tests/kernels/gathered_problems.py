"""Creates masks, key lists and inputs for the tests of attention over key lists."""

import torch

from gsa_kernels.key_lists.format import KeyLists


def random_mask(batch, length, chance, device):
    """Let every query select itself and each earlier key with the given chance."""
    mask = (torch.rand(batch, length, length, device=device) < chance).tril()
    return mask | torch.eye(length, dtype=torch.bool, device=device)


def document_mask(batch, length, device):
    """Select the causal keys of packed documents, which begin at different positions in each sequence."""
    position = torch.arange(length, device=device)
    cuts = torch.tensor([[length // 3 + b, length // 2 + 2 * b] for b in range(batch)], device=device)
    document = (position[None, :, None] >= cuts[:, None, :]).sum(-1)
    return (document[:, :, None] == document[:, None, :]).tril()


def block_mask(batch, length, block, window, chance, device):
    """Select keys before the window of a block's first query at random for all its queries, and add the windows."""
    position = torch.arange(length, device=device)
    row, key = position[:, None], position[None, :]
    leader = row // block * block
    chosen = torch.rand(batch, -(-length // block), length, device=device) < chance
    chosen = chosen.repeat_interleave(block, 1)[:, :length] & (key <= leader - window)
    return chosen | ((key <= row) & (row - key < window))


def with_full_parts(lists: KeyLists, block: int) -> KeyLists:
    """Return the same selection with entries that all queries of a tile share in the full part. Tiles of one block of
    queries that share these keys point to one copy of their list."""
    keys, words, fulls, counts, starts, word_starts = [], [], [], [], [], []
    num_keys = num_words = 0
    batch, tiles = lists.counts.shape
    for b in range(batch):
        for first_tile in range(0, tiles, max(1, block // lists.queries)):
            group = range(first_tile, min(first_tile + max(1, block // lists.queries), tiles))
            entries, shared = [], None
            for tile in group:
                rows = min(lists.queries, lists.length - tile * lists.queries)
                whole = -1 if rows == 32 else (1 << rows) - 1
                start, count = int(lists.key_starts[b, tile]), int(lists.counts[b, tile])
                entries.append(
                    dict(
                        zip(
                            lists.keys[start : start + count].tolist(),
                            lists.words[start : start + count].tolist(),
                            strict=True,
                        )
                    )
                )
                everyone = {key for key, word in entries[-1].items() if word == whole}
                shared = everyone if shared is None else shared & everyone
            rest = sorted(set().union(*entries) - shared)
            shared = sorted(shared)
            for e in entries:
                starts.append(num_keys)
                word_starts.append(num_words)
                fulls.append(len(shared))
                counts.append(len(shared) + len(rest))
                words += [e.get(key, 0) for key in rest]
                num_words += len(rest)
            keys += shared + rest
            num_keys += len(shared) + len(rest)

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=lists.keys.device)

    return KeyLists(
        keys=tensor(keys, torch.int32),
        words=tensor(words, torch.int32),
        key_starts=tensor(starts, torch.int64).view(batch, tiles),
        word_starts=tensor(word_starts, torch.int64).view(batch, tiles),
        full=tensor(fulls, torch.int32).view(batch, tiles),
        counts=tensor(counts, torch.int32).view(batch, tiles),
        queries=lists.queries,
        length=lists.length,
        max_count=max(counts) + 3,
    )
