"""Name the files of a run folder that other programs read. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from gsa_train.config import Config

LOCK = "lock"
"""Names the process that writes the folder, or wrote it last. It is never deleted."""
MONITOR_STOP = "monitor_stop.json"
"""Records the spike that ended the run. A later start that continues the run deletes it."""


def run_dir(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name
