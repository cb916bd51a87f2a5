"""What the command line of a pretraining run says."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE = "NVIDIA H200"
"""Whose time a dry run tells where no other is asked for: the one that an MFU has been measured on."""


@dataclass(frozen=True)
class Arguments:
    config_path: str
    overrides: tuple[str, ...]
    """`key=value`, in the order given."""
    resume_from: str | None
    """Folder of the checkpoint to start from."""
    no_resume: bool
    """Start at step 0 even if the run folder has checkpoints."""
    resume_after_stop: bool
    """Go on although the monitor stopped the run at a spike."""
    accept_new_data: bool
    """Where the checkpoint was trained on other text, start the config's text instead of refusing."""
    dry_run: bool
    world_size: int
    """Ranks: what `--world-size` plans for in a dry run, else what torchrun announced, else 1."""
    device: str = DEVICE
    """GPU whose time a dry run tells."""
    mfu: float | None = None
    """Share of that GPU's peak rate that a dry run takes for granted; None: what was measured."""
