"""`run.*`: name, folder, seed and time of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """The run folder is `<dir>/<name>`; a second start with the same folder resumes from its `latest`."""
    dir: str = "runs"
    """Folder that holds all runs."""
    seed: int = 1234
    """Seed of the initial weights and of the random number generators (the data order has its own)."""
    time_limit_minutes: float = 0.0
    """So long after its launch the run saves, stops and exits with code 75; 0 = no limit."""
    slurm_margin_minutes: float = 5.0
    """The same, so long before the end of the Slurm job, where Slurm tells it (or 10% of the job, if that is less)."""
