import shutil
from pathlib import Path

import pytest

from helpers.cpu_only import cpu_only  # noqa: F401 - pytest finds it here
from helpers.runs import Run, finished


@pytest.fixture
def old_run(tmp_path: Path) -> Run:
    """Copy a finished run of 20 steps on one rank to `tmp_path/run`."""
    original = finished()
    shutil.copytree(original.folder, tmp_path / "run")
    return Run(tmp_path / "run", None, original.log, "")
