"""Write compiled Triton kernels to disk so that a crash leaves no partial file and a full disk does not end the run.

Triton loads this class by name (kernel_cache.py) instead of its `FileCacheManager`. The files have the same paths and
contents as with `FileCacheManager`. Several ranks may write the same kernel at the same time, so each file is replaced
atomically.
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
    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._move(error)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file with fsync and return its path. Without fsync, a crash of the node may leave an empty kernel
        file, and every restart would fail because of this file."""
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
        """Write further files of this kernel to a temporary folder of this process."""
        folder = Path(_of_this_process().name)
        logger.warning("compiled kernels cannot be kept (%s): they are in %s for this process", error, folder)
        self.cache_dir = str(folder / self.key)
        self.lock_path = str(folder / self.key / "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


@functools.cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gsa_triton_")
