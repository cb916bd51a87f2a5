"""Lock a run folder so that only one run at a time writes to it. A second run would delete an unfinished save of the
first run.

The lock is a POSIX lock, so the system releases it when the process dies, and forked processes do not inherit it. NFS
and Lustre apply the lock across nodes. If the file system has no locks, the run logs a warning and continues.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO

from gsa_train.distributed.objects import on_main
from gsa_train.files import NO_LOCKS, own_file
from gsa_train.run_folder.paths import LOCK as FILE

PATIENCE_SECONDS = 10.0
"""Longest wait for a holder on this host, whose ranks notice within five seconds that torchrun has ended."""
REMOTE_PATIENCE_SECONDS = 120.0
"""Longest wait for a holder on another host. NFSv4 releases the lock of a dead client after 90 seconds."""

logger = logging.getLogger(__name__)


class RunFolderError(ValueError):
    """The run folder cannot be written, or another run holds its lock."""


class RunLock:
    """Locks the folder on the main rank until the process of the main rank ends.

    Read the folder only with the lock held, because another run may otherwise write to it at the same time. In
    particular, hold the lock when you look for the step to resume from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._made_folder = self._made_file = False
        self._made_parents: list[Path] = []

    def take(self) -> None:
        """Lock the folder, and create the folder if it is missing. Collective.

        Raises:
            RunFolderError: the lock cannot be taken. Raised on all ranks.
        """
        on_main(self._take, RunFolderError)

    def _take(self) -> None:
        if self._file is not None:
            return
        made = not self._folder.is_dir()
        self._made_parents = [each for each in self._folder.parents if not each.exists()]
        try:
            self._file = _lock(self._folder / FILE)
            # If two starts create the folder at once, the second start finds the holder that the first has written.
            self._made_file = not _holder(self._file)
            self._made_folder = made and self._made_file and os.listdir(self._folder) == [FILE]
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:
            self.take_back()
            raise RunFolderError(
                f"the run folder {self._folder} cannot be written: {error}; mend that, or set run.dir and run.name"
            ) from error

    def take_back(self) -> None:
        """Release the lock of a refused start. Remove folder and lock file if this start created them."""
        if self._made_folder:
            # A file server keeps open files, such as the lock.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run has a folder there
                for parent in self._made_parents:
                    parent.rmdir()
        elif self._made_file:
            (self._folder / FILE).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock(path: Path) -> IO[str]:
    began, told = time.monotonic(), False
    file = _open(path)
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_of(file, path):
                break
            file.close()  # a refused start has removed the file meanwhile
            file = _open(path)
            continue
        except OSError as error:
            if error.errno in NO_LOCKS:
                logger.warning(
                    "%s: no locks on this file system (%s); start no second run there", path, error
                )
                break
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        holder = _holder(file)
        is_here = holder.endswith(f" on {socket.gethostname()}")
        patience = PATIENCE_SECONDS if is_here else REMOTE_PATIENCE_SECONDS
        if time.monotonic() - began > patience:
            file.close()
            raise RunFolderError(
                f"another run writes {path.parent}: {holder or 'unknown'}. Stop it, or give this one another run.name. "
                f"If its node has died and the file server does not know, delete {path}."
            )
        if not told:
            logger.warning("%s is held by %s; waiting up to %.0f s for it", path, holder, patience)
            told = True
        time.sleep(0.5)
    return file


def _holder(file: IO[str]) -> str:
    """Returns the text of the lock file, empty for a new one. Bypasses the buffer to see writes of other processes."""
    return os.pread(file.fileno(), 1000, 0).decode(errors="replace").strip()


def _open(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8", opener=own_file)  # noqa: SIM115 (held while the run lasts)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise OSError(errno.EPERM, "it is a hard link to another file; delete it", str(path))
    return file


def _is_of(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
