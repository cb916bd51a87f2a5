"""Which tokens of a sequence each context-parallel rank holds.

The sequence is cut into n c chunks, c for each of n ranks, in c groups of n: a rank holds one chunk of each group, its
r-th, or its r-th from the end where the group's number has an odd number of bits set. With two groups that is the
zig-zag of megatron-core (r and 2 n - 1 - r): under a causal mask all ranks have the same work. What a query costs over
selected keys grows at first and then hardly; more groups balance that, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive queries of the sequence that this rank holds."""

    local: slice
    """Their place among this rank's tokens."""
    start: int
    """Position of the first one in the whole sequence."""
    end: int
    """One past the last position; these queries see keys [0, end)."""


@dataclass(frozen=True)
class ContextSharding:
    """How sequences are sharded over the context-parallel ranks, and this rank's place."""

    rank: int = 0
    size: int = 1
    chunks: int = 2
    """Chunks of a rank; even."""

    def numbers(self, rank: int) -> list[int]:
        """Returns the numbers of the chunks that a rank holds, in the order of the sequence."""
        turned = self.size - 1 - rank
        return [
            group * self.size + (turned if group.bit_count() % 2 else rank) for group in range(self.chunks)
        ]


def query_chunks(local_length: int, cut: ContextSharding) -> list[QueryChunk]:
    """Returns this rank's chunks in the order in which it holds them; on one rank the whole sequence.

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
