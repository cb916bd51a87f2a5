"""Chooses the tiles of `row_product` by the sizes of the weight."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    rows: int
    """Rows of the weight that a program multiplies, a power of two; with a gate, the number of pairs of rows."""

    warps: int = 4

    chunk: int = 128
    """Number of columns (a chunk) that a program loads at a time, if x has several rows."""

    stages: int = 4
    """Number of chunks in flight, if x has several rows."""


def default_tiling(batch: int, columns: int, count: int, gated: bool) -> Tiling:
    """Return the tiling for x [batch, columns] and a result of `count` columns."""
    if batch > 1:
        return Tiling(rows=32 if count >= 4096 and not gated else 16)
    if count >= 65536:  # an output layer
        return Tiling(rows=2)
    if count <= 2048 and columns <= 4096 and not gated:  # all tiles run at once
        return Tiling(rows=16, warps=8)
    rows = 4 if columns > 4096 else 8
    return Tiling(rows=rows // 2 if gated else rows)
