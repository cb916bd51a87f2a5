"""Ranks of a test run that are forked from a process which has imported everything.

Importing torch, megatron-core and gsa_train takes each rank 5 CPU seconds, more than most test runs train. So one
server (multiprocessing's forkserver) imports them, and its children get what torchrun gives its ranks: a session, an
environment, an output and a command line of their own; then they run the launcher's file as `__main__`.

What a real start has beyond that, and some runs therefore use (`real=True` in runs.py): torchrun's own handling of
failures, a seed of string hashes for each rank, and the interpreter's teardown after atexit.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = "gsa_train.train"
WAS_PRELOADED = HEAVY in sys.modules
"""Whether the process that imports this file, or the one that it was forked from, had imported the heavy part."""


class ForkedRanks:
    """The processes of one run, with what `runs.py` uses of subprocess.Popen.

    Args:
        command: the launcher's file and its arguments.
        environment: of the server (the first run's) and of all ranks.
        mark: environment of the ranks only, by which their descendants can be told.
        rendezvous: as under torchrun; else a single process that knows of no ranks, as under plain python.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        mark: Mapping[str, str],
        log: Path,
        ranks: int,
        rendezvous: bool,
    ) -> None:
        assert rendezvous or ranks == 1
        assert environment.get("CUDA_VISIBLE_DEVICES") == "", "runs on GPUs need real=True"
        # In this process, as torchrun's is in its agent: no rank has to find a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for_all = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._processes = []
        log.touch()
        CONTEXT.set_forkserver_preload([HEAVY, __name__])
        # The server imports from where this process does; on Python 3.11 it is not told by other means.
        with patch.dict(os.environ, {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
            for rank in range(ranks):
                own = {**for_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} if rendezvous else {}
                process = CONTEXT.Process(
                    target=_run_rank, args=(list(command), cwd, {**environment, **mark, **own}, log)
                )
                process.start()
                self._processes.append(process)
        atexit.register(self._end)  # before multiprocessing waits for them

    @property
    def pids(self) -> list[int]:
        """Each is a session of its own, too."""
        return [process.pid for process in self._processes if process.pid is not None]

    def poll(self) -> int | None:
        """None while a rank is at work; 0, or the exit code of one that failed, after which the others are ended."""
        codes = [process.exitcode for process in self._processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            self._end()
            return failed
        return None if None in codes else 0

    def wait(self, seconds: float) -> int:
        """Raises TimeoutError when ranks are at work after so many seconds."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            alive = [process.sentinel for process in self._processes if process.exitcode is None]
            if alive:  # else the last one ended since poll() looked, and nothing would end this wait
                connection.wait(alive, left)
        return code

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _run_rank(command: list[str], cwd: Path, environment: dict[str, str], log: Path) -> None:
    """In the child: become what `python command` would be, and stay it to the end."""
    assert WAS_PRELOADED, f"the server could not import {HEAVY}"
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(cwd / Path(command[0]).parent))
    gc.freeze()  # what the server imported need not be searched at each collection
    # Children of a forkserver would start theirs by another one: readers of text would import torch, 2 seconds each.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
