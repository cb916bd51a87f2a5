"""Open a separate connection to the store of torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def connect_to_store(timeout: timedelta) -> dist.Store:
    """Open a separate connection, because a thread that waits on a shared connection blocks all others. A single rank
    uses its own store."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )
