"""The statistics of `reference.py` on selections as bits: for a sample of the queries."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WordStatistics:
    sizes: torch.Tensor
    """|S_t|: int64 [B, R]."""
    overlaps: torch.Tensor
    """|S_t & S_{t-1}| / |S_t| of the P pairs: fp32 [B, P]; 0 where S_t is empty."""
    union_ratios: torch.Tensor
    """|union of S_t in the group| / mean |S_t| of the G groups: fp32 [B, G]; 0 where all are empty."""


def statistics_of_words(
    words: torch.Tensor, neighbours: torch.Tensor, grouped: torch.Tensor, group: int
) -> WordStatistics:
    """All at once: each operation is a launch, and bits are counted by ten of them.

    Args:
        words: int32 [B, R, ceil(Lk / 32)]; bit s % 32 of word s // 32 in row i set = query i selects key s
        neighbours: int64 [P]: the pairs are queries i and i + 1, of which i + 1 is t
        grouped: int64 [G * group], the queries of the groups, group after group
        group: at least 1
    """
    shared = (words[:, 1:] & words[:, :-1]).index_select(1, neighbours)
    union = words.index_select(1, grouped).unflatten(1, (len(grouped) // group, group))
    while union.shape[2] > 1:
        half, odd = divmod(union.shape[2], 2)
        joined = union[:, :, :half] | union[:, :, half : 2 * half]
        union = torch.cat([joined, union[:, :, -1:]], 2) if odd else joined
    counts = _count_bits(torch.cat([words, shared, union[:, :, 0]], 1))
    sizes, of_pairs, of_unions = counts.split([words.shape[1], len(neighbours), union.shape[1]], 1)
    positive = sizes.clamp(min=1)
    totals = sizes.index_select(1, grouped).unflatten(1, (*union.shape[1:2], group)).sum(-1)
    return WordStatistics(
        sizes,
        of_pairs / positive.index_select(1, neighbours + 1),
        of_unions * group / totals.clamp(min=1),
    )


def _count_bits(words: torch.Tensor) -> torch.Tensor:
    """Set bits over the last dimension, int64. Sums of neighbouring 1, 2, 4, ... bit fields."""
    # In int32: a negative word's shift copies its sign, which the masks take off.
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).sum(-1)
