"""Handles ranks of a bench that fail. If all fail at the same place, the bench continues. Otherwise it ends at once.

If only one rank runs out of memory, the other ranks wait in a collective that the failed rank never joins. The ranks
cannot start the next collective while this collective is unfinished. Each failed rank therefore writes to
torch.distributed's store how many collectives it has begun in each process group. If all ranks have the same numbers,
no collective is half done.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gsa_train.distributed.parallel import Parallel

GRACE_SECONDS = 30.0
"""How long a failed rank waits for the other ranks to fail. Their hosts may be a few steps late."""


class RankFailed(RuntimeError):
    """Says that this rank cannot continue with the others; the process must end without waiting for them."""

    def __init__(self, reason: str, speaks: bool) -> None:
        """
        Args:
            reason: which ranks failed, and why.
        """
        super().__init__(reason)
        self.speaks = speaks
        """True on the first rank to give up, which reports for all."""


@dataclass(frozen=True)
class Failure:
    reason: str
    collectives: dict[str, int]
    """Maps a group's name to the number of collectives begun in it."""


def agree(reason: str, number: int, parallel: Parallel) -> str:
    """Return a message about variant `number`, which failed on all ranks, so that they may continue.

    Raises:
        RankFailed: some rank did not fail, or ranks failed at different places.
    """
    store = dist.PrefixStore(f"bench_failure/{number}", _store())
    mine = Failure(reason, begun_collectives())
    store.set(str(parallel.rank), json.dumps([mine.reason, mine.collectives]))
    names = [str(rank) for rank in range(parallel.world_size)]
    with suppress(dist.DistStoreError):  # a rank that has not failed waits for this one
        store.wait(names, timedelta(seconds=GRACE_SECONDS))
    found = {
        rank: Failure(*json.loads(store.get(name))) for rank, name in enumerate(names) if store.check([name])
    }
    where = difference(found, parallel)
    if not where:
        return f"on all ranks: {found[0].reason}"
    ranks = "; ".join(f"rank {rank}: {each.reason}" for rank, each in found.items())
    raise RankFailed(f"{where}. {ranks}", _is_first(store))


def give_up(reason: str, number: int, parallel: Parallel) -> RankFailed:
    """Give up after an error that leaves a rank unreliable, for example a broken device."""
    store = dist.PrefixStore(f"bench_failure/{number}", _store())
    return RankFailed(f"rank {parallel.rank}: {reason}", _is_first(store))


def difference(failures: dict[int, Failure], parallel: Parallel) -> str:
    """Return the reason why the ranks cannot continue together, or an empty string if they can."""
    if len(failures) < parallel.world_size:
        return f"{len(failures)} of {parallel.world_size} ranks failed, and the others wait for them"
    if parallel.pipeline_size > 1:
        return "all ranks failed, but sends between pipeline stages may be left half done"
    counts: dict[str, set[int]] = {}
    for failure in failures.values():
        for group, count in failure.collectives.items():
            counts.setdefault(group, set()).add(count)
    if any(len(different) > 1 for different in counts.values()):
        return "all ranks failed, but at different places"
    return ""


def begun_collectives() -> dict[str, int]:
    """Count collectives by the group's name, which is the same on all its ranks."""
    world: Any = dist.distributed_c10d._world  # torch's stubs do not list all its groups
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in world.pg_map}


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _is_first(store: dist.Store) -> bool:
    return bool(store.add("gave_up", 1) == 1)
