"""The store of torch.distributed, by a connection of one's own."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def connect_to_store(timeout: timedelta) -> dist.Store:
    """A thread that waits on a shared connection would block all others. Without other ranks it is this process's."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )
