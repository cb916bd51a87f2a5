"""Tests the sums of bits by which corruption is found; tests/resume/test_wrong_bits.py has runs."""

import pytest
import torch

from gsa_train.reliability.monitor import corruption
from gsa_train.reliability.monitor.corruption import odd_ones_out


def bits_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return corruption.bits_of(tensors, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    weights = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = torch.zeros(4, dtype=torch.float32)
    before = bits_of([weights, others])
    integers = weights.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()])
    for bit in range(8 * weights.element_size() - 1):
        integers[1, 7] ^= 1 << bit
        assert bits_of([weights, others]) != before
        integers[1, 7] ^= 1 << bit
    weights[2, 3] *= -1
    assert bits_of([weights, others]) != before


def test_sums_of_none_and_of_some_are_on_one_device() -> None:
    """A model without experts has no such sums, and sums on two devices cannot be concatenated."""
    device = torch.device("meta")  # not the CPU, which is the default device
    some = [torch.zeros(3, device=device)]
    together = torch.stack([corruption.bits_of(some, device), corruption.bits_of([], device)])
    assert together.device == device


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ({0: 5}, []),
        ({0: 5, 1: 5, 2: 5}, []),
        ({0: 5, 1: 6}, [0, 1]),  # either may be wrong
        ({0: 5, 2: 6, 4: 5}, [2]),
        ({0: 7, 1: 6, 2: 5}, [0, 1, 2]),
        ({0: 5, 1: 6, 2: 5, 3: 6}, [0, 1, 2, 3]),
        ({0: 5, 1: 6, 2: 5, 3: 7, 4: 5}, [1, 3]),
    ],
)
def test_the_odd_ones_are_named_where_most_agree(sums: dict[int, int], odd: list[int]) -> None:
    assert sorted(odd_ones_out(sums)) == odd
