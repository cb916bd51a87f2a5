"""Starts torchrun's agents, several for several nodes, and finds the processes of single ranks."""

from functools import partial

import psutil

from helpers.forked import ForkedAgent
from helpers.runs import Run, processes_of, start

launch = partial(start, agent=True)
"""Start one agent of the run `run_dir/run` by options of `torchrun`. Agents with the same `mark` belong to one run."""


def ranks_of(run: Run) -> dict[int, psutil.Process]:
    """Map each rank of this agent to its living process."""
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
