"""Real torchrun agents, several of them where a test needs several nodes, and signals to single ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil

from helpers.runs import CONFIG, ENVIRONMENT, MARK, REPOSITORY, Run, faulty_launcher, processes_of


def launch(
    run_dir: Path,
    *overrides: str,
    torchrun: tuple[str, ...],
    mark: str = "",
    environment: dict[str, str] | None = None,
    faults: dict[str, Any] | None = None,
) -> Run:
    """One agent of the run `run_dir/run`. Agents with one `mark` belong to one run, as nodes of a job do.

    Args:
        faults: of its ranks, see faults.py.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = mark or uuid.uuid4().hex
    log = run_dir / f"agent-{uuid.uuid4().hex[:8]}.log"
    script, of_faults = faulty_launcher(run_dir, faults)
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, script]
    command += ["--config", CONFIG, f"run.dir={run_dir}", "run.name=run", *overrides]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, **of_faults, **(environment or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's foreground process group, for Ctrl-C
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Run(run_dir / "run", process, log, mark)


def ranks_of(run: Run) -> dict[int, psutil.Process]:
    """Rank -> its process, of all agents of the run."""
    agents = {process.pid for process in processes_of(run) if "torch.distributed.run" in process.cmdline()}
    return {
        int(process.environ()["RANK"]): process
        for process in processes_of(run)
        if process.ppid() in agents and "RANK" in process.environ()
    }
