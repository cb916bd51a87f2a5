"""Runs two ranks to the end of a run, where one freezes: python frozen_at_end.py FOLDER

Each case has a folder with `rank_N.err`, the output of that rank, and the watch's reports in `faults`. The script
prints JSON: rank 0's exit code by case, or null if rank 0 still hangs long after the watch's limit.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from gsa_train.process.console import drain_console
from gsa_train.reliability.hang_limit import StepLimit
from gsa_train.reliability.hang_watchdog import HangWatchdog
from gsa_train.run.finish import leave_world

LIMIT_SECONDS = 2.0
PATIENCE_SECONDS = 250.0
"""Limit for steps that do not hang, and for the wait for an end."""
CASES = {
    # For each case: where rank 1 freezes, and the expected exit code of the run.
    "before": ("the first barrier", 13),
    "between": ("the second barrier", 75),
    "never": ("", 0),
}


def leave(rank: int, listener: socket.socket, case: str, folder: Path) -> int:
    place, exit_code = CASES[case]
    store = dist.TCPStore(
        *listener.getsockname(),
        world_size=2,
        is_master=rank == 0,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    limit_seconds = LIMIT_SECONDS if place and rank == 0 else PATIENCE_SECONDS
    watch = HangWatchdog(rank, 2, StepLimit(limit_seconds), folder / "faults", step=7)
    watch.heartbeat(7, "ending")
    watch.exit_code = exit_code
    watch._beat()  # records the current place
    barrier, barriers = dist.barrier, iter(["the first barrier", "the second barrier"])

    def freezing_barrier() -> None:
        if next(barriers) == place and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        barrier()

    with patch.object(dist, "barrier", freezing_barrier):
        leave_world(watch)
    return exit_code


def fork(rank: int, listener: socket.socket, case: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    # The watch has its own connection to the store.
    host, port = listener.getsockname()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(rank))
    log = os.open(folder / f"rank_{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    code = 99
    try:
        code = leave(rank, listener, case, folder)
    except BaseException:
        traceback.print_exc()
    drain_console()
    os._exit(code)


def code_of(child: int, deadline: float) -> int | None:
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    children: dict[str, list[int]] = {}
    for case in CASES:
        folder = Path(sys.argv[1]) / case
        folder.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:  # reserved for rank 0 before it starts
            children[case] = [fork(rank, listener, case, folder) for rank in (0, 1)]
    deadline = time.monotonic() + PATIENCE_SECONDS
    codes = {case: code_of(first, deadline) for case, (first, _) in children.items()}
    for _, second in children.values():
        code_of(second, 0.0)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
