"""Known numbers over the links between the ranks: in a ring from neighbour to neighbour, and summed over all."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"cuda": 1 << 24, "cpu": 1 << 10}
"""Numbers in fp32 that a rank sends."""
LONGEST_SECONDS = 15.0
"""Of a transfer, the first of which also makes the connections."""


def faults_of_links(device: torch.device) -> list[str]:
    """What this rank received otherwise than it was sent, or not at all. Collective; after a fault of the second kind
    the process group is of no use any more."""
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return []
    size, found = SIZES[device.type], []
    before, after = (rank - 1) % count, (rank + 1) % count
    received = torch.empty(size, device=device)
    ring = [
        dist.P2POp(dist.isend, pattern(rank, size, device), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    if not _done(dist.batch_isend_irecv(ring)):
        return [f"nothing from rank {before} within {LONGEST_SECONDS:.0f} s, or nothing reaches rank {after}"]
    wrong = int((received != pattern(before, size, device)).sum())
    if wrong:
        found.append(f"{wrong} of {size} numbers from rank {before} are wrong")
    total = pattern(rank, size, device)
    work = dist.all_reduce(total, async_op=True)
    if not _done([work]):
        return [*found, f"a sum over all ranks has not ended within {LONGEST_SECONDS:.0f} s"]
    expected = count * torch.arange(size, device=device).remainder(1024) + sum(range(count))
    wrong = int((total != expected).sum())
    if wrong:
        found.append(f"{wrong} of {size} sums over all ranks are wrong")
    return found


def pattern(rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Integers, so that fp32 holds their sums over thousands of ranks exactly."""
    return (torch.arange(size, device=device).remainder(1024) + rank).float()


def _done(works: list[Any], clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether they end in time. On a GPU the host asks, for NCCL's own wait would only queue one; gloo's transfers say
    that they are complete to who waits for them, and to nobody else."""
    deadline = clock() + LONGEST_SECONDS
    if dist.get_backend() == "gloo":
        try:
            return all(work.wait(timedelta(seconds=LONGEST_SECONDS)) is not False for work in works)
        except RuntimeError:
            return False
    while not all(work.is_completed() for work in works):
        if clock() > deadline:
            return False
        time.sleep(0.001)
    for work in works:
        work.wait()
    return True
