"""Statistics on bits equal the same statistics on masks."""

import pytest
import torch

from gsa_kernels import adjacent_overlap, union_ratio
from gsa_kernels.statistics.words import adjacent_overlap_of_words, selected_per_row, union_ratio_of_words


def random_mask(length: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, length, length, generator=generator) < density
    return mask & torch.ones(length, length, dtype=torch.bool).tril()


def to_words(mask: torch.Tensor) -> torch.Tensor:
    batch, length, keys = mask.shape
    words = torch.zeros(batch, length, -(-keys // 32), dtype=torch.int64)
    for key in range(keys):
        words[:, :, key // 32] |= mask[:, :, key].long() << (key % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("length", [1, 2, 31, 33, 100, 2100])
@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_bits_and_masks_give_the_same(length: int, density: float) -> None:
    mask = random_mask(length, density, seed=length)
    words = to_words(mask)
    assert torch.equal(selected_per_row(words), mask.sum(-1))
    torch.testing.assert_close(adjacent_overlap_of_words(words), adjacent_overlap(mask))
    for group in (1, 8, 32):
        torch.testing.assert_close(union_ratio_of_words(words, group), union_ratio(mask, group))


def test_a_group_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        union_ratio_of_words(torch.zeros(1, 4, 1, dtype=torch.int32), 12)
