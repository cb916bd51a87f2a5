"""Choose the queries that attention statistics sample: evenly spaced stretches of adjacent queries.

The sampled positions depend only on the sequence length. They are the same in every sequence, layer and step, and in
every parallel layout. Differences between logged steps therefore never come from the sample, and checkpoints need not
store it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

STRETCH = 64
"""Adjacent queries per stretch: two groups of `union_ratio_32`, or one tile of the attention kernels."""
STRETCHES = 8
"""Stretches per sequence. The selections of their 512 queries are cheap to compare."""
SPARSE_EVERY = 16
"""Spacing of queries in statistics that cover all keys or have many values per query."""
GROUP = 32
"""Queries per union in `union_ratio_32`."""


@dataclass(frozen=True)
class QuerySample:
    """Lists the sampled queries in start .. end - 1 of a sequence; may be empty."""

    start: int
    end: int
    rows: torch.Tensor
    """int64 [S], ascending: indices of the queries in the chunk."""
    neighbours: torch.Tensor
    """int64 [P]: each i for which rows[i + 1] = rows[i] + 1."""
    grouped: torch.Tensor
    """int64 [G * group]: each i whose rows[i] is in a complete group of neighbours, group by group."""
    group: int
    """Queries in a group."""
    sparse: torch.Tensor
    """int64 [T]: the rows in the middle of each SPARSE_EVERY positions."""
    sparse_rows: torch.Tensor
    """int64 [T]: each i whose rows[i] is in `sparse`."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def compared(self) -> torch.Tensor:
        """Indices into `rows`: int64 [2 P + G * group + T]. In order: the first query of each pair, the second query of
        each pair, the members of the groups, and the sparse queries. One gather then fetches all of them."""
        return torch.cat([self.neighbours, self.neighbours + 1, self.grouped, self.sparse_rows])


def sampled_stretches(length: int) -> list[range]:
    """Return the sampled positions in a sequence of `length` tokens. If the sequence has at most STRETCH * STRETCHES
    tokens, all positions are sampled. A longer sequence is divided into STRETCHES equal parts, and STRETCH adjacent
    positions near the middle of each part are sampled. The first of these positions is a multiple of STRETCH, so that
    the boundary of a context-parallel chunk rarely separates them."""
    if length <= STRETCH * STRETCHES:
        return [range(length)]
    middles = [(2 * part + 1) * length // (2 * STRETCHES) for part in range(STRETCHES)]
    starts = [(middle - STRETCH // 2) // STRETCH * STRETCH for middle in middles]
    return [range(start, start + STRETCH) for start in starts]


def sample_queries(length: int, start: int, end: int, device: torch.device) -> QuerySample:
    """Sample the queries start .. end - 1 of a sequence. The host waits for the device.

    Pairs of neighbours, and groups of GROUP adjacent queries, lie inside this chunk. Incomplete groups are left out.
    But if this chunk's sample is fewer than GROUP adjacent queries, it forms one smaller group.
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
    if not grouped and len(neighbours) + 1 == len(rows):  # Fewer adjacent queries than a group.
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
