"""Write the report of a complete run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from gsa_train.run.state import Run
from gsa_train.run_folder.paths import run_dir
from gsa_train.services import Service


@dataclass
class Report(Service):
    run: Run

    def on_complete(self) -> None:
        """Draw the report in a child process of the main rank. No rank waits and no watchdog runs, because this process
        has left its process group."""
        if not self.run.parallel.is_main or not self.run.config.logging.plots:
            return
        folder, message = run_dir(self.run.config), self.run.services.log.message
        command = [sys.executable, "-m", "gsa_eval.commands.plot", str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            drawn = subprocess.run(
                command, env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False
            )
        except OSError as error:  # The limit of processes is reached.
            why: object = error
        else:
            if drawn.returncode == 0:
                message(f"wrote {drawn.stdout.strip()}")
                return
            why = (drawn.stderr.splitlines() or [f"exit code {drawn.returncode}"])[-1].removeprefix(
                "plot.py: error: "
            )
        message(f"the run is complete, and its report cannot be drawn: {why}; gsa-plot {folder} tries again")
