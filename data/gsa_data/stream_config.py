"""Defines the settings of a stream of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gsa_data.faults import Reading
from gsa_data.source_weights import check_weights


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a stream: the first seven fields determine the order of the blocks, the others how they are read."""

    seq_len_tokens: int
    """A block has seq_len_tokens + 1 tokens. May change between a save and a resume: no token is lost."""
    num_lanes: int
    """Fixed for the run. More lanes mix more documents into a batch. With few shards keep it small (8). Readers
    (data-parallel ranks x workers) may be any number; they make readers / gcd(readers, num_lanes) times the blocks
    that they hand out."""
    seed: int
    shuffle_documents: bool = True
    """Permute the documents inside each shard (shards themselves are always permuted)."""
    source_weights: Mapping[str, float] = field(default_factory=dict)
    """Number of times that an epoch has each document of a source (source_weights.py); 1 without a weight. May change
    between a save and a resume: only text after the saved position follows the new weights."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Cut blocks from concatenated documents, or fill them with whole documents (best_fit.py)."""
    packing_pool_documents: int = 128
    """Documents of a lane among which best_fit chooses; each resume reads them again."""
    reading: Reading = field(default_factory=Reading)
    """Policy for bad shards and lines."""
    num_workers: int = 0
    """Reader processes per rank; 0 reads in the training process."""
    prefetch_blocks: int = 64
    """Blocks each rank reads ahead when it has workers. Let it cover the time to open a shard (about 1 s)."""

    def __post_init__(self) -> None:
        for name in ("seq_len_tokens", "num_lanes", "packing_pool_documents", "prefetch_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be 0 (read in this process) or more")
        if self.packing not in ("concatenate", "best_fit"):
            raise ValueError(f"packing={self.packing!r} must be 'concatenate' or 'best_fit'")
        check_weights(self.source_weights)
