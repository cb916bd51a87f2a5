"""Real torchrun agents, several of them where a test needs several nodes, and signals to single ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from helpers.runs import CONFIG, ENVIRONMENT, MARK, REPOSITORY, Run, processes_of


def launch(
    run_dir: Path,
    *overrides: str,
    torchrun: tuple[str, ...],
    mark: str = "",
    environment: dict[str, str] | None = None,
) -> Run:
    """One agent of the run `run_dir/run`. Agents with one `mark` belong to one run, as nodes of a job do."""
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = mark or uuid.uuid4().hex
    log = run_dir / f"agent-{uuid.uuid4().hex[:8]}.log"
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "launch/pretrain.py"]
    command += ["--config", CONFIG, f"run.dir={run_dir}", "run.name=run", *overrides]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, **(environment or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
