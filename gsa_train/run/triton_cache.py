"""How compiled Triton kernels get onto the disk: whole after any crash, and a full disk costs the run nothing.

Triton loads this by its name (kernel_cache.py), where it would take its own `FileCacheManager`. Files are the same and
in the same places. Several ranks may compile and write one kernel at once: each file is replaced as a whole, by the
same content.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

logger = logging.getLogger(__name__)


class DurableCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Of one kernel."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._move(error)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Path of the file. Triton's own does not wait for the disk: after a crash of the node a kernel may be empty
        there, and fail all restarts."""
        content = data if isinstance(data, bytes) else str(data).encode()
        try:
            return self._write(content, filename)
        except OSError as error:
            self._move(error)
            return self._write(content, filename)

    def _write(self, content: bytes, filename: str) -> str:
        path = Path(self.cache_dir) / filename
        unfinished = path.with_name(f".{filename[:100]}.{uuid.uuid4()}")  # names have at most 255 bytes
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        return str(path)

    def _move(self, error: OSError) -> None:
        """What is compiled from now on of this kernel goes to a folder that ends with the process."""
        folder = _of_this_process()
        logger.warning("compiled kernels cannot be kept (%s): they are in %s for this process", error, folder)
        self.cache_dir = str(folder / self.key)
        self.lock_path = str(folder / self.key / "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


@functools.cache
def _held() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gsa_triton_")


def _of_this_process() -> Path:
    return Path(_held().name)
