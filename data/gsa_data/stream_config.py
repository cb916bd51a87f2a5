"""Define the settings of a stream of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gsa_data.faults import Reading
from gsa_data.source_weights import check_weights


@dataclass(frozen=True)
class StreamConfig:
    """Holds the settings of a stream. The first seven fields fix the order of the blocks. The other fields say how the
    blocks are read."""

    seq_len_tokens: int
    """A block has seq_len_tokens + 1 tokens. A resume may change the length without losing a token."""
    num_lanes: int
    """Number of token streams (lanes), fixed for the run. More lanes mix more documents into a batch. With few shards,
    use few lanes (8). A reader is a worker of a data-parallel rank. Any number of readers works, but each block is made
    by readers / gcd(readers, num_lanes) readers, so choose a divisor of num_lanes."""
    seed: int
    shuffle_documents: bool = True
    """Whether to permute the documents inside each shard. Shards are always permuted."""
    source_weights: Mapping[str, float] = field(default_factory=dict)
    """Source -> how often an epoch reads each document of the source (source_weights.py), by default once. A resume may
    change the weights for the text after the saved position."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Whether to cut blocks from concatenated documents, or to fill blocks with whole documents (best_fit.py)"""
    packing_pool_documents: int = 128
    """Number of documents of a lane among which best_fit chooses. Each resume reads them again."""
    reading: Reading = field(default_factory=Reading)
    """The policy for bad shards and lines"""
    num_workers: int = 0
    """Number of reader processes per rank. With 0 the training process reads."""
    prefetch_blocks: int = 64
    """Number of blocks that each rank prefetches with workers, to cover the time to open a shard (about 1 s)"""

    def __post_init__(self) -> None:
        for name in ("seq_len_tokens", "num_lanes", "packing_pool_documents", "prefetch_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be 0 (read in this process) or more")
        if self.packing not in ("concatenate", "best_fit"):
            raise ValueError(f"packing={self.packing!r} must be 'concatenate' or 'best_fit'")
        check_weights(self.source_weights)
