"""Which queries the statistics of attention look at: stretches of neighbours, evenly spread over the sequence.

Their positions follow from the sequence's length alone. They are the same in each sequence, layer and step, so that
what changes between two logged steps is the model, nothing is to be resumed, and no layout counts other queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

STRETCH = 64
"""Neighbours: two whole groups of `union_ratio_32`, and a tile of the attention kernels."""
STRETCHES = 8
"""Per sequence: 512 selections, which cost little to compare."""
SPARSE_EVERY = 16
"""One query in this many is enough for what goes over all keys or has many values of its own. 32 queries of a
sequence, 16 heads and 8 sequences are 4096 values of a layer's recall."""
GROUP = 32
"""Queries whose selections `union_ratio_32` joins."""


@dataclass(frozen=True)
class QuerySample:
    """The sampled ones among the queries start .. end - 1 of a sequence; perhaps none."""

    start: int
    end: int
    rows: torch.Tensor
    """int64 [S], ascending: their numbers among the queries of the chunk."""
    neighbours: torch.Tensor
    """int64 [P]: the i for which rows[i + 1] follows rows[i] in the sequence."""
    grouped: torch.Tensor
    """int64 [G * group]: the i of the rows in whole groups of neighbours, group after group."""
    group: int
    """Queries in a group."""
    sparse: torch.Tensor
    """int64 [T]: the rows in the middle of each SPARSE_EVERY positions of the sequence."""
    sparse_rows: torch.Tensor
    """int64 [T]: the i for which rows[i] is one of them."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def compared(self) -> torch.Tensor:
        """int64 [2 P + G * group + T]: the i of the earlier and of the later ones of the pairs, of the groups' members
        and of the sparse ones, so that one gather serves them all."""
        return torch.cat([self.neighbours, self.neighbours + 1, self.grouped, self.sparse_rows])


def sampled_stretches(length: int) -> list[range]:
    """Positions in a sequence of `length` tokens: all of up to STRETCH * STRETCHES, else a stretch about the middle of
    each of STRETCHES equal parts.

    Stretches begin at multiples of STRETCH, so that chunks of context-parallel ranks rarely cut one.
    """
    if length <= STRETCH * STRETCHES:
        return [range(length)]
    middles = [(2 * part + 1) * length // (2 * STRETCHES) for part in range(STRETCHES)]
    starts = [(middle - STRETCH // 2) // STRETCH * STRETCH for middle in middles]
    return [range(start, start + STRETCH) for start in starts]


def sample_queries(length: int, start: int, end: int, device: torch.device) -> QuerySample:
    """The sample among the queries start .. end - 1 of a sequence. Waits for the device.

    Neighbours and groups do not reach beyond the chunk. A short last group would count for too little and is left
    out, unless it is all that there is.
    """
    rows: list[int] = []
    neighbours: list[int] = []
    grouped: list[int] = []
    sparse_rows: list[int] = []
    for stretch in sampled_stretches(length):
        held = range(max(stretch.start, start), min(stretch.stop, end))
        first = len(rows)
        rows += [position - start for position in held]
        middle = SPARSE_EVERY // 2
        sparse_rows += [first + i for i, position in enumerate(held) if position % SPARSE_EVERY == middle]
        neighbours += range(first, len(rows) - 1)
        grouped += range(first, first + len(held) // GROUP * GROUP)
    group = GROUP
    if not grouped and len(neighbours) + 1 == len(rows):  # one stretch, shorter than a group
        grouped, group = list(range(len(rows))), len(rows)

    def numbers(each: list[int]) -> torch.Tensor:
        return torch.tensor(each, dtype=torch.int64, device=device)

    return QuerySample(
        start,
        end,
        numbers(rows),
        numbers(neighbours),
        numbers(grouped),
        group,
        numbers([rows[i] for i in sparse_rows]),
        numbers(sparse_rows),
    )
