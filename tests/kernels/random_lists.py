"""Creates key lists that use all features of the format."""

from dataclasses import replace

import torch

from gsa_kernels.key_lists.format import HostCounts, KeyLists, key_lists_from_mask, mask_from_key_lists


def lists_of(mask: torch.Tensor) -> KeyLists:
    """Return lists with gaps, bounds instead of counts on the host, and random bits beyond L."""
    lists, gap = key_lists_from_mask(mask), 3
    number = torch.arange(lists.counts.numel(), device=mask.device)
    tile = number.repeat_interleave(lists.counts.flatten())
    unspecified = torch.zeros_like(lists.words)
    if used := lists.length % 32:
        is_last = tile % lists.counts.shape[1] == lists.counts.shape[1] - 1
        unspecified = torch.randint_like(lists.words, -(2**31), 2**31 - 1) & (-1 << used) & -is_last.int()
    keys, words = torch.full((2, len(tile) + gap * len(number)), 2**31 - 1, device=mask.device).int()
    places = torch.arange(len(tile), device=mask.device) + gap * tile
    keys[places], words[places] = lists.keys, lists.words | unspecified
    lists = replace(
        lists,
        keys=keys,
        words=words,
        starts=lists.starts + gap * number.view_as(lists.starts),
        host_counts=HostCounts(lists.counts.cpu() + 2),
    )
    assert torch.equal(mask_from_key_lists(lists), mask)
    return lists
