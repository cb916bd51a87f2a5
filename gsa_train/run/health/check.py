"""The health of all devices of a job before it trains: which is bad, by host, index and UUID."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gsa_train.run.health.device_checks import faults_of_device
from gsa_train.run.health.driver import MISSING, XidWatch, faults_by_driver, open_driver, uuid_of
from gsa_train.run.health.links import faults_of_links
from gsa_train.run.last_words import SUBMISSION

if TYPE_CHECKING:  # megatron-core, which a look at a node does not need
    from gsa_train.parallel import Parallel

BAD_NODES = "bad_nodes"
"""In the folder of a Slurm submission: names of nodes, a line each, which the job is not to come back to."""

logger = logging.getLogger(__name__)


class UnhealthyDevice(RuntimeError):
    """A device, or the links of one, do not do what they should; says which, on all ranks alike."""


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


def check_device(device: torch.device, index: int, seconds: float) -> Finding:
    """One device alone."""
    node, uuid = os.environ.get("SLURMD_NODENAME") or socket.gethostname(), uuid_of(device)
    nvml = open_driver() if uuid else None
    if nvml is None:
        return Finding(node, index, uuid, faults_of_device(device, seconds), without_driver=bool(uuid))
    faults, asked = [], True
    try:
        xids = XidWatch(nvml, uuid)
    except nvml.NVMLError:  # a container that may not, a part of a device
        asked = False
    faults += faults_of_device(device, seconds)
    if asked:
        faults += [*faults_by_driver(nvml, uuid), *xids.faults()]
    return Finding(node, index, uuid, faults, without_driver=not asked)


def check_health(parallel: Parallel, seconds: float) -> None:
    """Of all devices of a run. Collective.

    Raises:
        UnhealthyDevice: something is wrong somewhere.
    """
    began = time.monotonic()
    mine = check_ranks(parallel.device, seconds)
    if parallel.is_main and parallel.device.type == "cuda":
        count = "1 GPU is" if parallel.world_size == 1 else f"{parallel.world_size} GPUs are"
        logger.info("%s healthy: products, memory and links, in %.1f s", count, time.monotonic() - began)
        if mine.without_driver:
            logger.warning("health: %s", MISSING)


def check_ranks(device: torch.device, seconds: float) -> Finding:
    """Each rank its own device, then the links between them. Collective over the world.

    Raises:
        UnhealthyDevice: something is wrong somewhere; no device may be used then.
    """
    index = int(os.environ.get("LOCAL_RANK", "0"))
    group = dist.new_group(backend="gloo")  # by the hosts' network, whatever the devices do
    mine = check_device(device, index, seconds)
    _refuse_bad(_gathered(mine, group))
    links = Finding(mine.node, index, mine.uuid, faults_of_links(device))
    _refuse_bad(_gathered(links, group))
    dist.destroy_process_group(group)
    return mine


def _gathered(mine: Finding, group: Any) -> list[Finding]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _refuse_bad(findings: Sequence[Finding]) -> None:
    bad = [each for each in findings if each.faults]
    if not bad:
        return
    if dist.get_rank() == 0:
        note_bad_nodes(bad)
    lines = "\n".join(f"  {each.in_words()}" for each in bad)
    raise UnhealthyDevice(
        f"{len(bad)} of {len(findings)} devices are not healthy:\n{lines}\nLeave them out and start the same command "
        "again (launch/check_node.py looks at a node alone; run.health_check_seconds = 0 looks at none)"
    )


def note_bad_nodes(bad: Sequence[Finding]) -> None:
    """In a job of launch/slurm/submit.py: for job.sh, which asks Slurm for other nodes."""
    folder = os.environ.get(SUBMISSION)
    if not folder:
        return
    path = Path(folder) / BAD_NODES
    with contextlib.suppress(OSError):  # the message has them
        known = path.read_text(encoding="utf-8").split() if path.exists() else []
        names = dict.fromkeys([*known, *(each.node for each in bad)])
        path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
