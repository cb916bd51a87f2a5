"""`profile.*`: traces of some steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProfileConfig:
    start_step: int = 0
    """First step that torch's profiler traces, counted from 1 as in the metrics. 0: none. A logged step also measures
    attention, so it takes longer than other steps."""
    steps: int = 3
    """Number of traced steps. Up to 5 are enough, because the files grow by megabytes a step."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that trace, each into its own files. Empty: all."""
    memory_snapshot: bool = False
    """Also record every allocation on the CUDA device in the traced steps, with its Python stack."""
