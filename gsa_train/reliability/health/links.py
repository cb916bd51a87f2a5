"""Check the links between the ranks: known numbers are sent around a ring, and summed over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"cuda": 1 << 24, "cpu": 1 << 10}
"""Numbers in fp32 that a rank sends, by kind of device."""
LONGEST_SECONDS = 15.0
"""Limit of a transfer. The first transfer also opens the connections."""
SECONDS_PER_RANK = 1 / 64
"""Assumed additional time per rank for the connections."""
VALUES = 64
"""Number of different values. fp32 holds their sums over 2^18 ranks exactly."""


def faults_of_neighbours(device: torch.device) -> list[str]:
    """Returns faults of the link from the previous rank: wrong numbers, or no transfer in time. Collective. After a
    failed transfer the process group must not be used again."""
    rank, count = dist.get_rank(), dist.get_world_size()
    size = SIZES[device.type]
    before, after = (rank - 1) % count, (rank + 1) % count
    try:
        received = torch.empty(size, device=device)
        ring = [
            dist.P2POp(dist.isend, pattern(rank, size, device), after),
            dist.P2POp(dist.irecv, received, before),
        ]
        if not _done(dist.batch_isend_irecv(ring)):
            late = f"{longest_seconds(count):.0f} s"
            return [f"nothing from rank {before} within {late}, or nothing reaches rank {after}"]
        wrong = int((received != pattern(before, size, device)).sum())
    except RuntimeError as error:  # from NCCL or gloo
        return [f"transfers from rank {before} and to rank {after} failed: {first_line(error)}"]
    return [f"{wrong} of {size} numbers from rank {before} are wrong"] if wrong else []


def faults_of_sums(device: torch.device) -> list[str]:
    """Returns faults of an all-reduce over all ranks, which cannot tell the rank at fault. Collective."""
    rank, count = dist.get_rank(), dist.get_world_size()
    size = SIZES[device.type]
    try:
        total = pattern(rank, size, device)
        if not _done([dist.all_reduce(total, async_op=True)]):
            return [f"a sum over all ranks has not ended within {longest_seconds(count):.0f} s"]
        wrong = int((total != expected_sum(count, size, device)).sum())
    except RuntimeError as error:
        return [f"a sum over all ranks failed: {first_line(error)}"]
    return [f"{wrong} of {size} sums over all ranks are wrong"] if wrong else []


def longest_seconds(count: int) -> float:
    return LONGEST_SECONDS + SECONDS_PER_RANK * count


def pattern(rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns a rank's [size] small integers in fp32."""
    return (torch.arange(size, device=device) + rank).remainder(VALUES).float()


def expected_sum(count: int, size: int, device: torch.device) -> torch.Tensor:
    whole, rest = divmod(count, VALUES)
    total = torch.full((size,), float(whole * sum(range(VALUES))), device=device)
    for rank in range(rest):
        total += pattern(rank, size, device)
    return total


def _done(works: list[Any], clock: Callable[[], float] = time.monotonic) -> bool:
    """Returns True if the transfers end in time. NCCL is polled, because its `wait` does not block the host. gloo
    reports completion only to `wait`.

    Raises:
        RuntimeError: a transfer failed.
    """
    longest = longest_seconds(dist.get_world_size())
    deadline = clock() + longest
    if dist.get_backend() == "gloo":
        for work in works:
            try:
                if work.wait(timedelta(seconds=longest)) is False:
                    return False
            except RuntimeError:
                if clock() < deadline:
                    raise
                return False
        return True
    while not all(work.is_completed() for work in works):
        if clock() > deadline:
            return False
        time.sleep(0.001)
    for work in works:
        work.wait()
    return True


def first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
