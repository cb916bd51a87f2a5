"""Starts torchrun's agents, several for several nodes, and finds the processes of single ranks."""

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil

from helpers.forked import ForkedAgent
from helpers.runs import CONFIG, ENVIRONMENT, MARK, REPOSITORY, Run, faulty_launcher, inherited, processes_of


def launch(
    run_dir: Path,
    *overrides: str,
    torchrun: tuple[str, ...],
    mark: str = "",
    environment: dict[str, str] | None = None,
    faults: dict[str, Any] | None = None,
    real: bool = False,
) -> Run:
    """Start one agent of the run `run_dir/run`. Agents with the same `mark` belong to one run, like nodes of a job.

    Args:
        faults: faults of its ranks, see faults.py.
        real: start interpreters for agent and ranks; else they are forked (see forked.py), which is much faster.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = mark or uuid.uuid4().hex
    log = run_dir / f"agent-{uuid.uuid4().hex[:8]}.log"
    script, of_faults = faulty_launcher(run_dir, faults)
    command = [script, "--config", CONFIG, f"run.dir={run_dir}", "run.name=run", *overrides]
    of_agent = {**inherited(), **ENVIRONMENT, **of_faults, **(environment or {})}
    if not real:
        forked = ForkedAgent(torchrun, command, REPOSITORY, of_agent, {MARK: mark}, log)
        return Run(run_dir / "run", forked, log, mark)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, *command],
            cwd=REPOSITORY,
            env=of_agent | {MARK: mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's foreground process group, for Ctrl-C
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Run(run_dir / "run", process, log, mark)


def ranks_of(run: Run) -> dict[int, psutil.Process]:
    """Map each rank of this agent to its living process."""
    assert run.process is not None
    if isinstance(run.process, ForkedAgent):
        return {rank: psutil.Process(pid) for rank, pid in run.process.ranks() if is_running(pid)}
    return {
        int(process.environ()["RANK"]): process
        for process in processes_of(run)
        if process.ppid() == run.process.pid and "RANK" in process.environ()
    }


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
