"""Tests partial rows of tiles summed by key: on CUDA if there is a device, else interpreted."""

import dataclasses

import pytest
import torch
from attention_problems import random_mask

from gsa_kernels.key_lists.format import HostCounts, key_lists_from_mask
from gsa_kernels.key_lists.triton_reduce_keys import TileRows, add_partials_by_key, find_key_hits, split_tiles


def test_ranges_of_tiles():
    """Ranges are consecutive and fit, without a spare row."""
    lists = key_lists_from_mask(random_mask(2, 200, 0.2, "cpu"))
    total, tiles = int(lists.counts.sum()), lists.counts.numel()

    def split(*arguments):
        ranges = split_tiles(lists, *arguments)
        assert [each.first for each in ranges] == [0, *(each.last for each in ranges[:-1])]
        assert ranges[-1].last == tiles
        for each in ranges:
            sizes = lists.counts.flatten()[each.first : each.last]
            assert sorted(each.order.tolist()) == list(range(each.last - each.first))
            assert sizes[each.order.long()].tolist() == sorted(sizes.tolist(), reverse=True)
        return ranges

    for rows in (1, 200, 500, total, 10 * total):
        ranges = split(rows)
        assert sum(each.num_rows for each in ranges) == total
        assert all(each.num_rows <= rows for each in ranges if each.last > each.first + 1)
    assert len(split(total)) == 1
    # Ranges have multiples of three tiles if three fit.
    lists = dataclasses.replace(lists, host_counts=HostCounts(torch.full((2, 7), lists.max_count)))
    assert [each.last - each.first for each in split_tiles(lists, 5 * lists.max_count, 3)] == [3, 3, 3, 5]
    assert [each.last - each.first for each in split_tiles(lists, 2 * lists.max_count, 3)] == [2] * 7


def test_errors(device):
    lists = key_lists_from_mask(random_mask(1, 40, 0.5, device))
    starts = torch.tensor([0, 64], device=device)
    order = torch.tensor([1, 0], dtype=torch.int32, device=device)
    hits = find_key_hits(lists, TileRows(0, 2, starts, order, 128))
    out = torch.zeros(1, 40, 1, 16, device=device)
    for call, message in [
        (lambda: find_key_hits(lists, TileRows(1, 3, starts, order, 128)), "last is"),
        (lambda: find_key_hits(lists, TileRows(0, 2, starts, order, 2**31)), "2147483648 rows"),
        (
            lambda: add_partials_by_key(torch.zeros(1, 126, 16, device=device), hits, out),
            "partials has shape",
        ),
        (lambda: add_partials_by_key(torch.zeros(1, 128, 24, device=device), hits, out[..., :1]), "out has"),
        (lambda: add_partials_by_key(torch.zeros(1, 128, 16, device=device), hits, out.half()), "float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
