"""Check that all ranks have the same config and see the same run folder, because each node reads its own files."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path

import torch.distributed as dist

from gsa_train.config import Config
from gsa_train.config.load import as_written, flat_fields
from gsa_train.distributed.objects import first_said, from_main
from gsa_train.distributed.parallel import Parallel
from gsa_train.run_folder.lock import RunFolderError
from gsa_train.run_folder.starts import run_id_of

OWN_OF_A_NODE = ("data.train_dir", "data.validation_dir", "data.validation_sets", "data.tokenizer")
"""Prefixes of fields that may differ, because the paths may name copies on each node. The contents of these files are
compared when the files are opened."""
MOST_NAMED = 4
"""Largest number of fields in the message."""
SEEN_AFTER_SECONDS = 90.0
"""Longest wait until an NFS client sees a folder that another client made (nfs(5): acdirmax, 60 s)."""


class OtherConfig(ValueError):
    """A rank has a config that differs from the main rank's config."""


def check_same_config(config: Config) -> None:
    """Raise OtherConfig on all ranks if a rank's config differs from rank 0's. Collective in the world group, because
    the other groups depend on the config."""
    mine = dict(flat_fields(dataclasses.asdict(config)))
    main = from_main(mine)
    differ = [
        f"{field} = {as_written(mine.get(field))}, on rank 0 {as_written(main.get(field))}"
        for field in {**main, **mine}
        if not field.startswith(OWN_OF_A_NODE) and mine.get(field) != main.get(field)
    ]
    more = f" and {len(differ) - MOST_NAMED} more" if differ[MOST_NAMED:] else ""
    named = "; ".join(differ[:MOST_NAMED]) + more
    line = f"rank {dist.get_rank()} on {socket.gethostname()} has another config: {named}"
    if (found := first_said(line if differ else None)) is not None:
        raise OtherConfig(f"{found}. Give all nodes the same config file and key=value.")


def check_folder_is_shared(folder: Path, run_id: str, parallel: Parallel) -> None:
    """Raise RunFolderError on all ranks if a rank does not see the main rank's run folder. Collective.

    Args:
        run_id: id that the main rank has just written to the folder.
    """
    deadline = time.monotonic() + SEEN_AFTER_SECONDS
    while not (is_seen := run_id_of(folder) == run_id) and time.monotonic() < deadline:
        time.sleep(0.5)
    host = socket.gethostname()
    line = f"rank {parallel.rank} on {host} does not see the run folder of rank 0, {folder.absolute()}"
    if (found := first_said(None if is_seen else line)) is not None:
        raise RunFolderError(
            f"{found}: each rank writes its part of a checkpoint there. Set run.dir to a folder that all nodes share."
        )
