"""Open a separate connection to the store of torch.distributed."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta

import torch.distributed as dist

from gsa_train.distributed.objects import from_main


def connect_to_store(purpose: str, timeout: timedelta, group: dist.ProcessGroup | None = None) -> dist.Store:
    """Open a separate connection to the store. Collective over `group`.

    A thread that waits on a shared connection blocks all other threads that use it, so each purpose has a connection of
    its own. A process that was started without torchrun makes its own store.

    All keys get a prefix that differs between starts, because torchrun may keep its store, with old entries, across
    restarts.
    """
    name = from_main(uuid.uuid4().hex, group)
    store: dist.Store = dist.HashStore()
    if "RANK" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"{purpose}/{name}", store)
