"""`checkpoint.*`: saves, and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 500
    """Steps between checkpoints; the end of the run always writes one."""
    keep_last: int = 3
    """Checkpoints kept; older ones are deleted once a newer one is durable. With monitor.action=rewind what a
    spike goes back to stays, too, however often a run is stopped and saved in between."""
    async_save: bool = True
    """Training waits only for a copy in host memory (on GPUs pinned and kept: this rank's share of the checkpoint);
    writing goes on behind it. False waits until the checkpoint is durable."""
    save_retries: int = 3
    """A failed save is reported and tried again with the state of a later step, so many times in a row; then the run
    stops (exit code 3)."""
    retry_after_steps: int = 10
    """Steps until the first new try; twice as many before each following one. A regular save counts as a try."""
    verify: Literal["full", "sizes"] = "full"
    """What a resume checks of a checkpoint before it loads it: every file's size and checksum (the ranks together read
    it once more), or sizes only."""
    initial_weights: str = ""
    """Folder of a checkpoint (or of a run: its newest one) whose weights a run has at step 0. All else begins anew:
    text, optimizer, schedules. Lengths, rotary base, budgets and phases may be others; gates and indexer may be new."""
