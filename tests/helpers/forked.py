"""Forks the ranks of a test run from a process that has imported everything.

In most test runs, importing torch, megatron-core and gsa_train takes more CPU time than everything else. Therefore one
server process (multiprocessing's forkserver) imports them once, and forks a child for each rank. Like a rank under
torchrun, a child gets its own session, environment, output and command line. It then runs the launcher's file as
`__main__`.

`ForkedRanks` runs the ranks without torchrun. `ForkedAgent` runs torchrun in a child. This torchrun handles failures,
signals and lost nodes as always, but it forks its ranks instead of starting interpreters.

If a test passes `real=True` (runs.py), the run starts the real launcher without forks. Unlike a forked rank, each rank
then has its own string-hash seed, and tears down its interpreter at the end.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import torch.distributed as dist
from torch._dynamo import utils as dynamo_utils

CONTEXT = multiprocessing.get_context("forkserver")
HEAVY = "gsa_train.train"
LATER = ("wandb.sdk.launch", "transformers.utils.chat_template_utils", "gsa_train.optimizer.zero")
"""Modules of W&B, chats and DeepSpeed that runs import later; skipped if not installed."""
OF_RANKS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled at run time, and the import is a second faster
}
"""Environment in which the server imports; each rank has its own."""
WAS_PRELOADED = HEAVY in sys.modules
"""Whether the process that imports this file, or its parent, had imported the heavy part."""


class ForkedRanks:
    """Holds the processes of one run, with the methods of subprocess.Popen that `runs.py` uses.

    Args:
        command: the launcher's file and its arguments.
        environment: environment of all ranks. The server that forks them has the environment of the first run.
        mark: further variables of the ranks, which identify their descendants.
        rendezvous: whether ranks find each other as under torchrun; False: one process, as under plain python.
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
        # This process hosts the store, as torchrun's agent does. No rank has to find a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for_all = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        self._processes = []
        for rank in range(ranks):
            of_rank = {**environment, **mark}
            of_rank.pop(
                "LOCAL_RANK", None
            )  # importing DeepSpeed sets it, and accelerate would wait for its world
            if rendezvous:
                of_rank |= {**for_all, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (list(command), cwd, of_rank, log)
            self._processes.append(start_process(_run_rank, arguments, environment, log))
        self._failed: dict[int, int] = {}
        atexit.register(self._end)  # before multiprocessing waits for them

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def codes(self) -> set[int]:
        return {*self._failed.values()}

    @property
    def ends(self) -> str:
        """Describe how the ranks ended that failed by themselves."""
        return "; ".join(f"rank {rank} ended {_in_words(code)}" for rank, code in self._failed.items())

    def poll(self) -> int | None:
        """If a rank has failed, end the other ranks and return its exit code. Otherwise return None while ranks run,
        and 0 when all have ended."""
        codes = [process.exitcode for process in self._processes]
        if not self._failed and any(codes):
            self._failed = {rank: code for rank, code in enumerate(codes) if code}
            self._processes[0].join(
                1.0
            )  # torchrun asks the others to end: the main rank still prints its reason
            self._failed |= {rank: p.exitcode for rank, p in enumerate(self._processes) if p.exitcode}
            self._end()
        if self._failed:
            return next(iter(self._failed.values()))
        return None if None in codes else 0

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            alive = [process.sentinel for process in self._processes if process.exitcode is None]
            if alive:  # otherwise the last one ended since poll() looked, and the wait would never end
                connection.wait(alive, left)
        return code

    def end_with_stacks(self) -> None:
        """End hanging ranks one after the other; the log gets the stacks of their threads."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
                process.join(10)  # a stopped process does not respond
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            kill_unless_over(process)
        for process in self._processes:
            process.join()


class ForkedAgent:
    """Runs `torchrun OPTIONS COMMAND` with forked ranks, and has the methods of subprocess.Popen that `runs.py` uses.

    Args:
        torchrun: options of torchrun.
        command: the launcher's file and its arguments.
        environment: environment of all processes, with further variables in `mark`. The server has the environment of
            the first run.
    """

    def __init__(
        self,
        torchrun: Sequence[str],
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        mark: Mapping[str, str],
        log: Path,
    ) -> None:
        assert environment.get("CUDA_VISIBLE_DEVICES") == "", "runs on GPUs need real=True"
        self._ranks = log.with_suffix(".ranks")
        arguments = (list(torchrun), list(command), cwd, {**environment, **mark}, log, self._ranks)
        self._process = start_process(_run_agent, arguments, environment, log)
        atexit.register(kill_unless_over, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ranks(self) -> list[tuple[int, int]]:
        """Return (rank, process id) of all ranks started so far, earlier restarts first. Each is a session."""
        lines = self._ranks.read_text().splitlines() if self._ranks.exists() else []
        return [(int(rank), int(pid)) for rank, pid in (line.split() for line in lines)]

    @property
    def pids(self) -> list[int]:
        return [self.pid, *(pid for _, pid in self.ranks())]

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def kill_unless_over(process: ForkServerProcess) -> None:
    """Kill a process, unless it has ended. The server reaps ended children at once, so another process may already have
    the id of an ended child."""
    if process.exitcode is None:  # multiprocessing does not check by itself
        process.kill()


def _in_words(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def start_server(environment: Mapping[str, str]) -> None:
    """Start the server in this process unless it runs; it ends with this process and its forks."""
    CONTEXT.set_forkserver_preload(["helpers.quiet", HEAVY, "torch.distributed.run", *LATER, __name__])
    # The server must import from the same paths as this process. On Python 3.11 only PYTHONPATH tells it.
    with patch.dict(os.environ, {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        forkserver._forkserver.ensure_running()


def keep_server() -> None:
    """In a fork, reuse the parent's server. Otherwise multiprocessing would wait for the server as for a child."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        server.ensure_running = resource_tracker.ensure_running


def start_process(
    target: Callable[..., None], arguments: tuple[object, ...], environment: Mapping[str, str], log: Path
) -> ForkServerProcess:
    log.touch()
    start_server(environment)
    process = CONTEXT.Process(target=target, args=arguments)
    # Without this, each child would first run this process's main file, pytest, under another name.
    with patch.object(sys.modules["__main__"], "__file__", None):
        process.start()
    return process


def _run_agent(
    torchrun: list[str], command: list[str], cwd: Path, environment: dict[str, str], log: Path, ranks: Path
) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    become(cwd, environment, log)

    def fork(handler: SubprocessHandler, arguments: Sequence[str], of_rank: dict[str, str]) -> _ForkedRank:
        *_, unbuffered = arguments[: arguments.index(command[0])]
        assert unbuffered == "-u", arguments
        return _ForkedRank(list(arguments[arguments.index(command[0]) :]), cwd, of_rank, ranks)

    def name_of_caller(depth: int = 2) -> str:
        """Replace torch's function, which searches all modules for the source of every frame at each event."""
        return sys._getframe(depth).f_code.co_name

    sys.argv = ["torchrun", *torchrun, *command]
    with (
        patch.object(SubprocessHandler, "_popen", fork),
        patch.object(dynamic_rendezvous, "get_method_name", name_of_caller),
    ):
        run.main(sys.argv[1:])


class Fork:
    """Runs a function in a child process, with the subprocess.Popen methods that torchrun uses."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _leave_with(run)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _leave_with(run: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def usual_signals(numbers: Iterable[int]) -> None:
    """Restore signals in a fork, so that they end the process instead of calling its parent's handlers."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _ForkedRank(Fork):
    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str], ranks: Path) -> None:
        def run() -> None:
            with ranks.open("a") as file:
                file.write(f"{environment['RANK']} {os.getpid()}\n")
            usual_signals((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
            _let_go_of_files()
            become(cwd, environment)
            run_file(command)

        super().__init__(run)

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", seconds)
            time.sleep(0.01)
        return code


def _let_go_of_files() -> None:
    """Point all inherited file descriptors above 2 to /dev/null. Otherwise the fork would keep the connections of a
    torchrun agent that has ended. The descriptors are not closed, because inherited objects may close them later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the descriptor that listed them
                os.dup2(nothing, int(name), inheritable=False)


def _run_rank(command: list[str], cwd: Path, environment: dict[str, str], log: Path) -> None:
    """Become what `python command` would be, in the child, until the end."""
    become(cwd, environment, log)
    run_file(command)


def become(cwd: Path, environment: dict[str, str], log: Path | None = None) -> None:
    assert WAS_PRELOADED, f"the server could not import {HEAVY}"
    os.setsid()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    faulthandler.enable(
        2
    )  # A process that ends by its own signal, for example by C++'s abort(), prints where.
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)


def _leave_imports_as_they_are() -> None:
    """Skip the cleanup of imported modules when this fork ends. Otherwise torch would remove thousands of operators
    from its dispatcher one by one, and print compile times."""
    for inherited in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        inherited.atexit = False
    atexit.unregister(dynamo_utils.dump_compile_times)


def run_file(command: list[str]) -> None:
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    gc.freeze()  # imported objects need not be searched at each collection
    _leave_imports_as_they_are()
    # Children of a forkserver would start another one for their children, and each reader would import torch.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        # An interpreter also prints the exception before exit handlers, which may wait for other ranks and be killed.
        sys.excepthook(*sys.exc_info())  # torch's hook puts the rank before each line
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
