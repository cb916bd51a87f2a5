"""Runs launch/pretrain.py with the faults (helpers/faults.py) in the environment, for `start(..., faults=...)`."""

import json
import os
import runpy
from pathlib import Path

from helpers.faults import Faults
from helpers.runs import FAULTS, REPOSITORY

if __name__ == "__main__":
    faults, marks = json.loads(os.environ[FAULTS])
    with Faults(faults, Path(marks)).patched():
        runpy.run_path(str(REPOSITORY / "launch" / "pretrain.py"), run_name="__main__")
