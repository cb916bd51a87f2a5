"""`checkpoint.*`: saves, and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 500
    """Steps between checkpoints. The end of the run always writes one."""
    keep_last: int = 3
    """Checkpoints kept; older ones are deleted once a newer one is on the disk. With monitor.action=rewind the one
    that a spike would go back to also stays."""
    keep_every_steps: int = 0
    """Checkpoints of the multiples of this many steps are milestones: kept beside `keep_last`, for good. A multiple of
    `every_steps`; 0 = none."""
    async_save: bool = True
    """True: copies in host memory (pinned on GPUs) are filled while the next step computes, and threads write them.
    False: training waits until the checkpoint is on the disk."""
    save_retries: int = 3
    """How often in a row a failed save is tried again, with the state of a later step; then the run stops with exit
    code 3."""
    retry_after_steps: int = 10
    """Steps until the first new try; each following one waits twice as many. A regular save counts as a try."""
    verify: Literal["full", "sizes"] = "full"
    """What a resume checks of a checkpoint. `full`: size and checksum of every file, those with tensors while they are
    loaded. `sizes`: sizes only."""
    initial_weights: str = ""
    """Folder of a checkpoint (or of a run: its newest one) whose weights the run has at step 0. Optimizer and schedules
    start again, and so does the text, unless `initial_text` says otherwise. Sequence length, rotary base and scaling,
    budgets and phases may differ; gates and indexer may be new. Empty: random weights."""
    initial_text: Literal["anew", "continue"] = "anew"
    """With `initial_weights`, where the text begins. `continue`: where that checkpoint stood in it; text, tokenizer and
    `data.seed` must be the same."""
