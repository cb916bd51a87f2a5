"""`checkpoint.*`: saves, and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 500
    """Steps between checkpoints. The end of the run always writes one."""
    keep_last: int = 3
    """Number of checkpoints that are kept. Older checkpoints are deleted once a newer one is on the disk."""
    keep_every_steps: int = 0
    """Checkpoints at multiples of this number of steps are kept permanently, in addition to `keep_last`. It must be a
    multiple of `every_steps`. 0: none."""
    async_save: bool = True
    """True: copies in host memory (pinned on GPUs) are filled while the next step computes, and threads write them.
    False: training waits until the checkpoint is on the disk."""
    save_retries: int = 3
    """Number of consecutive retries of a failed save, each with the state of a later step. Then the run stops with
    exit code 3."""
    retry_after_steps: int = 10
    """Steps until the first retry. The wait doubles with each retry. A regular save counts as a retry."""
    verify: Literal["full", "sizes"] = "full"
    """What a resume checks of a checkpoint. `full`: size and checksum of every file. `sizes`: sizes only."""
    initial_weights: str = ""
    """Folder of a checkpoint, or of a run for its newest checkpoint, which gives the weights at step 0. Schedules start
    again. Optimizer and text also start again by default (`initial_state`, `initial_text`). Sequence length, rotary
    base and scaling, budgets and phases may differ. Gates and indexer may be new. Empty: random weights."""
    initial_text: Literal["fresh", "continue"] = "fresh"
    """With `initial_weights`, where the text begins. `continue`: where that checkpoint stopped reading. Text,
    tokenizer and `data.seed` must then be the same."""
    initial_state: Literal["fresh", "continue"] = "fresh"
    """With `initial_weights`, the optimizer's state. `continue`: that checkpoint's state, step count and position in
    the text, for a cool-down. Its phase must have trained what the first phase trains, with the same
    `train.optimizer`."""
