"""Tests selections as lists of keys per tile of queries: the format and its inverse."""

import dataclasses

import pytest
import torch

from gsa_kernels.key_lists.format import key_lists_from_mask, mask_from_key_lists


@pytest.mark.parametrize("queries", [16, 32])
@pytest.mark.parametrize("length", [1, 31, 64, 77])
def test_lists_hold_the_mask(queries: int, length: int) -> None:
    torch.manual_seed(0)
    mask = (torch.rand(2, length, length) < 0.3).tril()
    lists = key_lists_from_mask(mask, queries)
    assert torch.equal(mask_from_key_lists(lists), mask)
    assert int(lists.counts.sum()) == lists.keys.numel() == lists.words.numel()


def test_a_key_named_twice_is_refused() -> None:
    lists = key_lists_from_mask(torch.ones(1, 32, 32, dtype=torch.bool).tril())
    twice = dataclasses.replace(lists, keys=torch.zeros_like(lists.keys))
    with pytest.raises(ValueError, match="names a key twice"):
        mask_from_key_lists(twice)


def test_other_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="queries is 8"):
        key_lists_from_mask(torch.ones(1, 8, 8, dtype=torch.bool), 8)
