"""Decide which tokens of a sequence each context-parallel rank holds.

With n ranks, the sequence is cut into c groups of n chunks, and each rank holds one chunk of every group. If a group's
index (from 0) has an even number of ones in binary, rank r holds chunk r of the group, otherwise chunk n - 1 - r.

With two groups, rank r holds chunks r and 2 n - 1 - r of the sequence, which is megatron-core's zig-zag. In dense
attention, the zig-zag gives all ranks equal work. In sparse attention, a query's cost grows over the first positions
and then hardly changes, so more groups balance the work better.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive queries of the sequence that this rank holds."""

    local: slice
    """Place of the queries among this rank's tokens."""
    start: int
    """Position of the first query in the whole sequence."""
    end: int
    """One past the last position. These queries see keys [0, end)."""


@dataclass(frozen=True)
class ContextSharding:
    """Describes how sequences are sharded over the context-parallel ranks, and this rank's place."""

    rank: int = 0
    size: int = 1
    chunks: int = 2
    """Number of chunks per rank, which is even."""

    def numbers(self, rank: int) -> list[int]:
        """Returns the numbers of the chunks that a rank holds, in the order of the sequence."""
        turned = self.size - 1 - rank
        return [
            group * self.size + (turned if group.bit_count() % 2 else rank) for group in range(self.chunks)
        ]


def query_chunks(local_length: int, cut: ContextSharding) -> list[QueryChunk]:
    """Returns this rank's chunks in the order in which the rank holds them. A single rank gets the whole sequence.

    Args:
        local_length: number of tokens of this rank, L / size.
    """
    if cut.size == 1:
        return [QueryChunk(slice(0, local_length), 0, local_length)]
    length = local_length // cut.chunks
    return [
        QueryChunk(slice(place * length, (place + 1) * length), number * length, (number + 1) * length)
        for place, number in enumerate(cut.numbers(cut.rank))
    ]
