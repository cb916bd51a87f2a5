"""Compiled Triton kernels, kept beside the runs: the ranks of all nodes share them, and a restart finds them again.

Triton's own place is the home folder, which in a container goes with the job. Nothing else of a step is compiled at a
start: cuBLAS and NCCL come compiled, and torch's compiler is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gsa_train.config import RunConfig

VARIABLE = "TRITON_CACHE_DIR"
MANAGER = "TRITON_CACHE_MANAGER"
FOLDER = ".triton_cache"
"""In `run.dir`, so that runs of one shape share it, and a run folder that is deleted does not take it along."""


def prepare_kernel_cache(config: RunConfig, environment: MutableMapping[str, str]) -> None:
    """Say to Triton where compiled kernels are, unless someone has. Call it before a kernel is compiled.

    Args:
        environment: of this process.
    """
    folder = Path(config.kernel_cache_dir or Path(config.dir) / FOLDER).absolute()
    environment.setdefault(VARIABLE, str(folder))
    environment.setdefault(MANAGER, "gsa_train.run.triton_cache:DurableCache")


def kernel_cache_in_words(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Where compiled kernels are, who said so, and how many there are."""
    folder = Path(environment[VARIABLE])
    ours = Path(config.kernel_cache_dir or Path(config.dir) / FOLDER).absolute()
    source = ""
    if folder != ours:
        asked = (
            f" instead of run.kernel_cache_dir = {config.kernel_cache_dir}" if config.kernel_cache_dir else ""
        )
        source = f" ({VARIABLE} of the environment{asked})"
    try:
        count = sum(1 for _ in folder.iterdir())
    except OSError:  # none yet, or it cannot be read, which costs a compilation
        count = 0
    return f"{folder}{source}: {count} entries of earlier starts"
