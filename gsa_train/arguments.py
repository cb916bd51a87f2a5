"""Defines the parsed command line of `pretrain.py`."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE = "NVIDIA H200"
"""Default GPU of the time estimate in a dry run, because its MFU has been measured."""


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
    """Continue although the monitor stopped the run at a spike."""
    accept_new_data: bool
    """If the checkpoint has other data than the config, start at the beginning of the config's data instead of
    refusing."""
    dry_run: bool
    world_size: int
    """Number of ranks: `--world-size` in a dry run, else torchrun's WORLD_SIZE, else 1."""
    device: str = DEVICE
    """GPU that a dry run estimates times for."""
    mfu: float | None = None
    """Model FLOPs utilization that a dry run assumes for that GPU; None: the measured one."""
