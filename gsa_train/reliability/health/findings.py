"""Exchange the faults that ranks find at their devices and links. A rank that does not answer counts as a fault.

The exchange uses the store of torch.distributed instead of a collective, because a collective would wait for a rank
whose device hangs in its driver.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from gsa_train.distributed.objects import gathered
from gsa_train.distributed.store import connect_to_store

ANSWER_SECONDS = 120.0
"""Longest time between the first and the last answer. Ranks do the same work on equal devices."""


@dataclass(frozen=True)
class Finding:
    node: str
    """Slurm's name of the node, else the host's name."""
    index: int
    """Index of the device in its process."""
    uuid: str
    """Empty for a CPU."""
    faults: list[str] = field(default_factory=list)

    def in_words(self) -> str:
        name = f"GPU {self.index} ({self.uuid})" if self.uuid else f"CPU of local rank {self.index}"
        return f"{name} on {self.node}: {'; '.join(self.faults) or 'nothing is wrong'}"


class Exchange:
    def __init__(self, mine: Finding) -> None:
        """Collective. Call it while all ranks still answer."""
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo")  # uses the hosts' network, not the devices
        self._store = connect_to_store("health", timedelta(seconds=10 * ANSWER_SECONDS), group)
        self._devices = gathered(mine, group)
        dist.destroy_process_group(group)

    def tell_all(self, stage: str, mine: Finding, at_first: Callable[[list[Finding]], None]) -> list[Finding]:
        """Share this rank's finding. Returns the findings of all ranks, with the same faults on each rank.

        Args:
            at_first: called with all findings, on the first rank that has them. Other ranks get the findings
                afterwards, because they may then end the job.

        Raises:
            RuntimeError: neither the first nor the last rank answers.
        """
        self._store.set(f"{stage}/{self._rank}", json.dumps(asdict(mine)))
        if self._rank in (0, self._count - 1):
            found = self._collect(stage)
            if self._rank == 0 or not self._store.check([f"{stage}/0"]):
                at_first(found)
                # Send only bad findings, because thousands of ranks read this value.
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
            except RuntimeError:  # timeout of the store
                silent = (
                    f"rank {rank} has not answered for {ANSWER_SECONDS:.0f} s: its device or its host hangs"
                )
                found.append(replace(device, faults=[silent]))
        return found


def nodes_of_bad_devices(findings: Sequence[Finding]) -> list[str]:
    """Returns the nodes with bad devices, each once. If all of several nodes are bad, returns none, because the cause
    is then probably the driver or the check, and excluding nodes would not help."""
    named = list(dict.fromkeys(each.node for each in findings if each.faults))
    nodes = {each.node for each in findings}
    return [] if len(named) == len(nodes) > 1 else named


def nodes_of_bad_links(findings: Sequence[Finding]) -> list[str]:
    """Returns the nodes at fault for bad links in the ring of ranks, or none if these would be all nodes. Each rank
    reports the link from the previous rank. If both links of a node are bad, that node is at fault and its neighbours
    are not. Both ends of an isolated bad link are named."""
    nodes = [each.node for each in findings]
    links = [{nodes[rank - 1], nodes[rank]} for rank, each in enumerate(findings) if each.faults]
    counts = Counter(node for link in links for node in link)
    alone = {node for link in links for node in link if len(link) == 1 or counts[node] > 1}
    named = alone.union(*(link for link in links if not link & alone))
    return [node for node in dict.fromkeys(nodes) if node in named] if named != set(nodes) else []
