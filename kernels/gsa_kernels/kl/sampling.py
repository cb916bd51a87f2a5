"""Which rows an estimate of the indexer's loss calculates."""

import math

import torch

SAMPLED_ROWS = 128
"""Rows per tile that a fraction takes or leaves."""


def row_ranges(num_rows: int, fraction: float, seed: int | None) -> tuple[list[tuple[int, int]], float]:
    """Ranges [start, stop) of rows to compute, and the factor that makes their sum an unbiased estimate.

    Args:
        fraction: share of the tiles of rows, in (0, 1]; 1 takes all
        seed: chooses the tiles, each with the same probability
    """
    if fraction == 1:
        return [(0, num_rows)], 1.0
    tiles = math.ceil(num_rows / SAMPLED_ROWS)
    kept = min(max(1, round(fraction * tiles)), tiles)
    first = int(torch.randint(tiles, (), generator=torch.Generator().manual_seed(int(seed or 0))))
    # Neighbours, around the end if need be: at most two ranges, and so few kernels.
    stop = first + kept
    parts = [(first, min(stop, tiles)), (0, stop - tiles)]
    ranges = [
        (start * SAMPLED_ROWS, min(end * SAMPLED_ROWS, num_rows))
        for start, end in sorted(parts)
        if end > start
    ]
    return ranges, tiles / kept
