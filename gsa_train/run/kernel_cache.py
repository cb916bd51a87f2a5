"""Set Triton's cache folder to a folder in `run.dir`, which all nodes and restarts share.

Triton's default is the home folder. A container loses its home folder when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gsa_train.config import RunConfig

VARIABLE = "TRITON_CACHE_DIR"
MANAGER = "TRITON_CACHE_MANAGER"
FOLDER = ".triton_cache"
"""Folder in `run.dir`, outside the run folder. Runs with the same shapes share it, and it outlives each run folder."""


def prepare_kernel_cache(config: RunConfig, environment: MutableMapping[str, str]) -> None:
    """Set Triton's cache folder unless the environment already sets it. Call it before a kernel is compiled."""
    folder = Path(config.kernel_cache_dir or Path(config.dir) / FOLDER).absolute()
    environment.setdefault(VARIABLE, str(folder))
    environment.setdefault(MANAGER, "gsa_train.run.triton_cache:DurableCache")


def kernel_cache_in_words(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Returns a line with the cache folder, the source of that setting and the number of entries."""
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
    except OSError:  # The folder is missing or not readable: kernels are compiled again.
        count = 0
    return f"{folder}{source}: {count} entries of earlier starts"
