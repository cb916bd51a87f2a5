"""`run.*`: name, folder, seed and time of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """Name of the run. Its folder is `<dir>/<name>`. A second start with this folder resumes from the checkpoint
    that its `latest` names."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 1234
    """Seed of the initial weights and of the random number generators. The order of the data has its own seed."""
    kernel_cache_dir: str = ""
    """Folder of compiled Triton kernels, which all ranks share and restarts reuse. Empty: `.triton_cache` in `dir`.
    `TRITON_CACHE_DIR` in the environment takes precedence."""
    health_check_seconds: float = 4.0
    """Seconds for which each GPU, before a start, computes matrix products with known results. The check also tests the
    GPU's memory and the links between ranks. A bad device is named and ends the start with exit code 15. CPUs compute
    two small products. 0: no check."""
    time_limit_minutes: float = 0.0
    """Minutes after its start at which the run saves, stops and exits with code 75; 0 = no limit."""
    slurm_margin_minutes: float = 5.0
    """Minutes before the end of its Slurm job at which the run saves, stops and exits with code 75. It is at most 10%
    of the job's time."""
