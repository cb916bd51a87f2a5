"""The statistics of `reference.py` on selections as bits, without an L x L mask.

words: int32 [B, L, ceil(Lk / 32)]; bit s % 32 of word s // 32 in row t set = t selects key s.
"""

import torch

_ROWS_PER_CHUNK = 1024  # a multiple of every group size; bounds the temporaries to 1024 rows


def selected_per_row(words: torch.Tensor) -> torch.Tensor:
    """|S_t|: int64 [B, L]."""
    return torch.cat([_count_bits(part) for part in words.split(_ROWS_PER_CHUNK, 1)], 1)


def adjacent_overlap_of_words(words: torch.Tensor) -> torch.Tensor:
    """Mean over t >= 1 of |S_t & S_{t-1}| / |S_t|; queries that select nothing are left out. 0-d fp32."""
    ratios, counted = words.new_zeros((), dtype=torch.float32), words.new_zeros((), dtype=torch.int64)
    for start in range(1, words.shape[1], _ROWS_PER_CHUNK):
        now = words[:, start : start + _ROWS_PER_CHUNK]
        before = words[:, start - 1 : start - 1 + now.shape[1]]
        size = _count_bits(now)
        ratios += (_count_bits(now & before) / size.clamp(min=1)).sum()
        counted += (size > 0).sum()
    return ratios / counted.clamp(min=1)


def union_ratio_of_words(words: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Mean over aligned groups of |union of S_t in the group| / mean |S_t|; a short last group is left out,
    unless it is the only one. 0-d fp32.

    Args:
        group: a power of two, at most 1024.
    """
    if group & (group - 1) or not 1 <= group <= _ROWS_PER_CHUNK:
        raise ValueError(f"group is {group}; pass a power of two up to {_ROWS_PER_CHUNK}")
    length = words.shape[1]
    if length < group:
        # zero rows fill the group up; the mean is over the rows that there are
        filled = torch.nn.functional.pad(words, (0, 0, 0, group - length))
        return union_ratio_of_words(filled, group) * (length / group)
    ratios, counted = words.new_zeros((), dtype=torch.float32), words.new_zeros((), dtype=torch.int64)
    for part in words[:, : length - length % group].split(_ROWS_PER_CHUNK, 1):
        mean_size = _count_bits(part).float().unflatten(1, (-1, group)).mean(-1)
        union = part
        for _ in range(group.bit_length() - 1):
            union = union[:, ::2] | union[:, 1::2]
        ratios += (_count_bits(union) / torch.where(mean_size > 0, mean_size, 1)).sum()
        counted += (mean_size > 0).sum()
    return ratios / counted.clamp(min=1)


def _count_bits(words: torch.Tensor) -> torch.Tensor:
    """Set bits over the last dimension, int64. Sums of neighbouring 1, 2, 4, ... bit fields."""
    x = words.to(torch.int64) & 0xFFFFFFFF
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (((x * 0x01010101) & 0xFFFFFFFF) >> 24).sum(-1)
