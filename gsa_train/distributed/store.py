"""Open a separate connection to the store of torch.distributed."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta

import torch.distributed as dist

from gsa_train.distributed.objects import from_main


def connect_to_store(purpose: str, timeout: timedelta, group: dist.ProcessGroup | None = None) -> dist.Store:
    """Open a separate connection to the store. Collective over `group`.

    A separate connection is needed, because a thread that waits on a shared connection blocks all other threads that
    use it. A process that was started without torchrun has a store of its own.

    All keys get a prefix that is different in each start, because torchrun may keep its store across restarts. The
    store then still has the entries of earlier ranks.
    """
    name = from_main(uuid.uuid4().hex, group)
    store: dist.Store = dist.HashStore()
    if "RANK" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"{purpose}/{name}", store)
