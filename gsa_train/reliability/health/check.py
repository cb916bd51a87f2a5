"""Check all devices of a job before training, and name bad devices by host, index and UUID."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gsa_train.files import own_file
from gsa_train.reliability.health.device_checks import faults_of_device
from gsa_train.reliability.health.findings import Exchange, Finding, nodes_of_bad_devices, nodes_of_bad_links
from gsa_train.reliability.health.links import faults_of_neighbours, faults_of_sums, first_line
from gsa_train.reliability.last_words import SUBMISSION

if TYPE_CHECKING:  # imports megatron-core, which a check of a node does not need
    from gsa_train.distributed.parallel import Parallel

BAD_NODES = "bad_nodes"
"""File in the folder of a Slurm submission: names of nodes, one a line, that the job must avoid."""

logger = logging.getLogger(__name__)


class UnhealthyDevice(RuntimeError):
    """A device or its links failed the check. The message, the same on all ranks, names it."""


def check_device(device: torch.device, index: int, seconds: float) -> Finding:
    try:
        faults = faults_of_device(device, seconds)
    except RuntimeError as error:  # most bad devices raise an error
        faults = [f"its check failed: {first_line(error)}"]
    return replace(device_here(device, index), faults=faults)


def device_here(device: torch.device, index: int) -> Finding:
    uuid = ""
    if device.type == "cuda":
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        except RuntimeError:  # the check reports the fault
            uuid = "GPU that does not answer"
    return Finding(_node(), index, uuid)


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_presence() -> None:
    """Check that this rank's GPU exists and answers. Call this before the ranks join a process group, because the join
    would wait for a bad GPU.

    Raises:
        UnhealthyDevice: the GPU is lost or fails at once; raised on this rank only.
        DeviceError: the node has fewer GPUs than ranks.
    """
    index, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # A job of launch/slurm/submit.py has one task per node, which sees all GPUs that Slurm allocated.
    given = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if SUBMISSION in os.environ else 0
    fault = None
    if found < given and torch.backends.cuda.is_built():
        fault = f"of {given} GPUs that Slurm has given {found} are found"
    elif 0 < found <= index:
        from gsa_train.distributed.parallel import DeviceError

        raise DeviceError(
            f"local rank {index} has no GPU of its own, as this machine shows {found}: start no more ranks than GPUs "
            "on it (--nproc_per_node), or look whether one is lost (nvidia-smi)"
        )
    elif found:
        try:
            torch.cuda.set_device(index)
            torch.ones(1, device="cuda").sum().item()
        except RuntimeError as error:
            fault = f"it fails at once: {first_line(error)}"
    if fault is not None:
        note_bad_nodes([node := _node()])
        remedy = f"Leave out {node} and start the same command again"
        raise UnhealthyDevice(f"GPU {index} on {node}: {fault}. {remedy}")


def check_health(parallel: Parallel, seconds: float) -> None:
    """Check each rank's device, then the links between the ranks. Collective over the world group.

    Raises:
        UnhealthyDevice: a device or link of any rank is bad; do not use any device afterwards.
    """
    began, device = time.monotonic(), parallel.device
    here = device_here(device, int(os.environ.get("LOCAL_RANK", "0")))
    exchange = Exchange(here)
    _tell_all(exchange, "devices", check_device(device, here.index, seconds), nodes_of_bad_devices)
    if parallel.world_size > 1:
        # Check neighbours first, because an all-reduce never ends if a neighbour cannot be reached.
        neighbours = replace(here, faults=faults_of_neighbours(device))
        _tell_all(exchange, "neighbours", neighbours, nodes_of_bad_links)
        _tell_all(exchange, "sums", replace(here, faults=faults_of_sums(device)), lambda _: [])
    if parallel.is_main and parallel.device.type == "cuda":
        count = "1 GPU is" if parallel.world_size == 1 else f"{parallel.world_size} GPUs are"
        logger.info("%s healthy: products, memory and links, in %.1f s", count, time.monotonic() - began)


def _tell_all(
    exchange: Exchange,
    stage: str,
    mine: Finding,
    at_fault: Callable[[Sequence[Finding]], list[str]],
) -> None:
    """
    Args:
        at_fault: returns the nodes at fault, or an empty list if the findings do not tell.
    """
    found = exchange.tell_all(stage, mine, lambda findings: note_bad_nodes(at_fault(findings)))
    bad = [each for each in found if each.faults]
    if bad:
        lines = "\n".join(f"  {each.in_words()}" for each in bad)
        nodes = ", ".join(at_fault(found))
        raise UnhealthyDevice(
            f"{len(bad)} of {len(found)} devices are not healthy:\n{lines}\n"
            + (f"Leave out {nodes}" if nodes else "Which node is at fault this does not tell: find it")
            + " and start the same command again (run.health_check_seconds = 0 looks at none)"
        )


def note_bad_nodes(nodes: Sequence[str]) -> None:
    """In a job of launch/slurm/submit.py, record bad nodes for job.sh, which asks Slurm for other nodes."""
    folder = os.environ.get(SUBMISSION)
    if not folder or not nodes:
        return
    path = Path(folder) / BAD_NODES
    with contextlib.suppress(OSError):  # The message names the nodes too.
        known = path.read_text(encoding="utf-8").split() if path.exists() else []
        new = [name for name in dict.fromkeys(nodes) if name not in known]
        # Append, because other nodes may write at the same time.
        with open(path, "a", encoding="utf-8", opener=own_file) as file:
            file.write("".join(f"{name}\n" for name in new))
