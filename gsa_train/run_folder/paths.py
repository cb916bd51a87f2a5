"""Returns the paths of a run's files."""

from __future__ import annotations

from pathlib import Path

from gsa_train.config import Config


def run_dir(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name
