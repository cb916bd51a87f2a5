"""Read a checkpoint while its run continues. The run may delete it meanwhile (checkpoint.keep_last)."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gsa_eval.convert.export_hf import find_source

TRIES = 5
PAUSE_SECONDS = 1.0
"""Pause before the next try, because a shared file system may show deleted files for a while."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def read_source(
    run_dir: Path | None,
    step: int | None,
    checkpoint: Path | None,
    read: Callable[[Path, Path | None], Result],
) -> Result:
    """Returns the result of `read` for a checkpoint. A run may delete the checkpoint meanwhile, because there is no
    lock. If neither `step` nor `checkpoint` names the checkpoint, the newest one is then read instead.

    Args:
        run_dir, step, checkpoint: arguments of `find_source`.
        read: called with the checkpoint and its run's folder, once per attempt; raises OSError or ValueError if
            something is missing or damaged.

    Raises:
        ValueError: the checkpoint does not exist, or the named checkpoint was deleted during the read, or `TRIES`
            newest checkpoints were deleted.
        ValueError, OSError: raised by `read` while the checkpoint still exists.
    """
    for _ in range(TRIES):
        found, run = find_source(run_dir, step, checkpoint)
        inode = _inode(found)
        try:
            return read(found, run)
        except (OSError, ValueError) as error:
            now = None if isinstance(error, OSError) and error.errno == errno.ESTALE else _inode(found)
            if now == inode:
                if isinstance(error, FileNotFoundError) and Path(error.filename or "").parent == found:
                    raise ValueError(
                        f"{found} is damaged: {Path(error.filename).name} is missing. Give another checkpoint."
                    ) from error
                raise
        if now is None and (step is not None or found == checkpoint):
            raise ValueError(
                f"{found}: the run deleted this checkpoint while it was read; give a newer one, or keep more of them "
                "by checkpoint.keep_last or checkpoint.keep_every_steps"
            )
        change = "deleted" if now is None else "written again"
        logger.warning(
            "%s was %s by its run while it was read: the newest one is read instead", found, change
        )
        time.sleep(PAUSE_SECONDS)
    raise ValueError(
        f"{found.parent}: the run deleted {TRIES} checkpoints while they were read; keep more of them by "
        "checkpoint.keep_last, or read one that it keeps (checkpoint.keep_every_steps) by its step"
    )


def _inode(folder: Path) -> int | None:
    """Returns the folder's inode (a new folder of the same name has another one), or None without a folder."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None
