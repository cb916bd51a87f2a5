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
    """True: training continues during a save. The state is copied to host memory (pinned on GPUs) while the next step
    computes, and threads write the copies. False: training waits until the checkpoint is on the disk."""
    save_retries: int = 3
    """Number of consecutive retries of a failed save, each with the state of a later step. Then the run stops with
    exit code 3."""
    retry_after_steps: int = 10
    """Steps from a failed save to its first retry. The wait doubles with each retry. A regular save is also a retry."""
    verify: Literal["full", "sizes"] = "full"
    """What a resume checks of a checkpoint. `full`: size and checksum of every file. `sizes`: sizes only."""
    initial_weights: str = ""
    """Folder of a checkpoint, or of a run (for its newest checkpoint), with the weights for step 0. Learning-rate
    schedules start again, and by default also optimizer state and text (`initial_state`, `initial_text`). Sequence
    length, rotary base and scaling, key budgets and phases may differ, and gates and indexer may be new. Empty: random
    weights."""
    initial_text: Literal["fresh", "continue"] = "fresh"
    """With `initial_weights`, where the text begins. `continue`: where the checkpoint's run stopped reading. Text,
    tokenizer and `data.seed` must then be the same."""
    initial_state: Literal["fresh", "continue"] = "fresh"
    """With `initial_weights`, the optimizer state. `continue`: take state, step count and position in the text from the
    checkpoint, for a cool-down. Its phase must have trained the same parameters as the first phase here, with the same
    `train.optimizer`."""
