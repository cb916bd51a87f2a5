"""Ranks of a bench that fail: where all of them do at the same place the bench goes on, else it ends at once.

A rank that runs out of memory alone leaves the others in a collective that it will never join, and no rank may join
another before that one. So failed ranks compare, through torch.distributed's store, how many collectives each has
begun in each of its groups: only where these are the same, nothing is left half done.
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
"""How long a failed rank waits for the others to fail, too: their hosts may lag a few steps."""


class RankFailed(RuntimeError):
    """This rank cannot go on together with the others; the process must end without waiting for them."""

    def __init__(self, reason: str, speaks: bool) -> None:
        """
        Args:
            reason: which ranks failed, of what.
        """
        super().__init__(reason)
        self.speaks = speaks
        """The first rank to give up: it reports for all."""


@dataclass(frozen=True)
class Failure:
    """Of one rank."""

    reason: str
    collectives: dict[str, int]
    """Group's name -> collectives begun in it."""


def agree(reason: str, number: int, parallel: Parallel) -> str:
    """What to say of variant `number`, which failed on this rank: all ranks did, and may go on.

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
    """For an error after which no rank can be relied on, this one's device for example."""
    store = dist.PrefixStore(f"bench_failure/{number}", _store())
    return RankFailed(f"rank {parallel.rank}: {reason}", _is_first(store))


def difference(failures: dict[int, Failure], parallel: Parallel) -> str:
    """Why the ranks cannot go on together; empty where they can."""
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
    """By the name of the group, which all its ranks share."""
    world: Any = dist.distributed_c10d._world  # whose groups torch's stubs do not tell in full
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in world.pg_map}


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _is_first(store: dist.Store) -> bool:
    return bool(store.add("gave_up", 1) == 1)
