"""What ranks find at their devices and links, told to all of them: a rank that does not answer is a finding, too.

By the store of torch.distributed: a collective would wait for a rank whose device hangs in its driver.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gsa_train.distributed.store import connect_to_store

ANSWER_SECONDS = 120.0
"""That ranks may be apart, who do the same work on devices of one kind."""


@dataclass(frozen=True)
class Finding:
    """Of one device."""

    node: str
    """As Slurm calls it, else the host's name."""
    index: int
    """Of the device in its process."""
    uuid: str
    """Empty for a CPU."""
    faults: list[str] = field(default_factory=list)
    without_driver: bool = False
    """A GPU whose driver could not be asked."""

    def in_words(self) -> str:
        name = f"GPU {self.index} ({self.uuid})" if self.uuid else f"CPU of local rank {self.index}"
        return f"{name} on {self.node}: {'; '.join(self.faults) or 'nothing is wrong'}"


class Exchange:
    """Of the findings of all ranks."""

    def __init__(self, mine: Finding) -> None:
        """Collective, while all ranks still answer.

        Args:
            mine: this rank's device, without faults.
        """
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        # torchrun may keep its store over restarts, with what earlier ranks wrote.
        name: list[Any] = [uuid.uuid4().hex]
        group = dist.new_group(backend="gloo")  # by the hosts' network, whatever the devices do
        dist.broadcast_object_list(name, src=0, group=group)
        self._devices: list[Finding] = [mine] * self._count
        dist.all_gather_object(self._devices, mine, group=group)
        dist.destroy_process_group(group)
        longest = timedelta(seconds=10 * ANSWER_SECONDS)
        self._store = dist.PrefixStore(f"health/{name[0]}", connect_to_store(longest))

    def tell_all(self, stage: str, mine: Finding, at_first: Callable[[list[Finding]], None]) -> list[Finding]:
        """The findings of all ranks, whose faults are the same on each. Called by each when it is through.

        Args:
            at_first: called with them on one rank, before any other has them: then ranks begin to end.

        Raises:
            RuntimeError: neither the first nor the last rank answers.
        """
        self._store.set(f"{stage}/{self._rank}", json.dumps(asdict(mine)))
        if self._rank in (0, self._count - 1):
            found = self._collect(stage)
            if self._rank == 0 or not self._has_answered(stage, 0):
                at_first(found)
                # Thousands of ranks read this, and mostly nothing is wrong.
                bad = {rank: asdict(each) for rank, each in enumerate(found) if each.faults}
                self._store.set(stage, json.dumps(bad))
                return found
        self._store.wait([stage], timedelta(seconds=3 * ANSWER_SECONDS))
        told = {int(rank): Finding(**each) for rank, each in json.loads(self._store.get(stage)).items()}
        return [told.get(rank, device) for rank, device in enumerate(self._devices)]

    def _collect(self, stage: str) -> list[Finding]:
        deadline = time.monotonic() + ANSWER_SECONDS
        found = []
        for rank, device in enumerate(self._devices):
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([f"{stage}/{rank}"], timedelta(seconds=left))
                found.append(Finding(**json.loads(self._store.get(f"{stage}/{rank}"))))
            except RuntimeError:  # of the store, after this time
                silent = (
                    f"rank {rank} has not answered for {ANSWER_SECONDS:.0f} s: its device or its host hangs"
                )
                found.append(replace(device, faults=[silent]))
        return found

    def _has_answered(self, stage: str, rank: int) -> bool:
        return bool(self._store.check([f"{stage}/{rank}"]))


def nodes_of_bad_devices(findings: Sequence[Finding]) -> list[str]:
    """Names, each once; none where it would be all of several: that is the driver, or the check itself, and a job that
    went on elsewhere would leave out one node after another."""
    named = list(dict.fromkeys(each.node for each in findings if each.faults))
    nodes = {each.node for each in findings}
    return [] if len(named) == len(nodes) > 1 else named


def nodes_of_bad_links(findings: Sequence[Finding]) -> list[str]:
    """Where a rank's finding is about the link from the rank before it, in a ring: the nodes that explain all of them,
    each once; none where nothing tells these from the others.

    A node whose links to both sides are bad is at fault, and its neighbours are not; of a link that is bad alone, both
    ends are named.
    """
    nodes = [each.node for each in findings]
    links = [{nodes[rank - 1], nodes[rank]} for rank, each in enumerate(findings) if each.faults]
    counts = Counter(node for link in links for node in link)
    alone = {node for link in links for node in link if len(link) == 1 or counts[node] > 1}
    named = alone.union(*(link for link in links if not link & alone))
    return [node for node in dict.fromkeys(nodes) if node in named] if named != set(nodes) else []
