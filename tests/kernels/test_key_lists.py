"""Tests selections as lists of keys per tile of queries: the format and its inverse."""

import dataclasses

import pytest
import torch

from gsa_kernels.key_lists.format import key_lists_from_mask, mask_from_key_lists


def test_a_key_named_twice_is_refused() -> None:
    lists = key_lists_from_mask(torch.ones(1, 32, 32, dtype=torch.bool).tril())
    twice = dataclasses.replace(lists, keys=torch.zeros_like(lists.keys))
    with pytest.raises(ValueError, match="names a key twice"):
        mask_from_key_lists(twice)
