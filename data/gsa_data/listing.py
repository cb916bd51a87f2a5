"""Which files lie below a folder or an fsspec address."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fsspec.implementations.local import LocalFileSystem

from gsa_data.faults import DataFault, Reading
from gsa_data.fetch import file_system, with_retries

FORMATS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")
"""Of text."""
INDEXED = (".idx", ".bin")
"""Of megatron-core's datasets."""
PACKED = ("zst", "gz", "bz2", "xz", "lz4")
"""Endings behind the one that says what a file holds."""

T = TypeVar("T")


def list_files(root: str, reading: Reading) -> dict[str, int]:
    """Size in bytes of every file below `root`, by its path from there; 0 for those that are in none of FORMATS and
    INDEXED.

    Raises DataFault when `root` is no folder, or when any part of it cannot be listed.
    """
    filesystem, base = file_system(root)
    base = base.rstrip("/")

    def listing() -> dict[str, int] | None:
        if not filesystem.exists(base):
            return None
        if isinstance(filesystem, LocalFileSystem) and os.path.isdir(base):
            return dict(_local_files(base))
        return {
            path[len(base) :].lstrip("/"): int(info.get("size") or 0)
            for path, info in filesystem.find(base, detail=True).items()
            if info.get("type", "file") == "file"
        }

    found = retried(listing, root, reading)
    if found is None:
        raise DataFault(f"data folder {root!r} does not exist; check the path, or build a corpus there first")
    if "" in found:
        raise DataFault(f"{root!r} is a file; give the folder it lies in")
    for path in found:
        if path.endswith(FORMATS) and ("::" in path or not path.isprintable()):
            raise DataFault(
                f"{path!r} in {root!r} cannot be addressed; rename it without '::' and control characters"
            )
    return found


def retried(action: Callable[[], T], root: str, reading: Reading) -> T:
    """The result of `action`, tried again after an error that may pass; DataFault when none of the tries got it."""
    try:
        return with_retries(action, reading, Counter())
    except OSError as error:
        raise DataFault(
            f"data folder {root!r} cannot be read ({type(error).__name__}: {error}); check address and access"
        ) from error


def _local_files(folder: str, relative: str = "", above: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """(path, bytes) of the files, links followed. fsspec's own listing passes over links, and over folders that
    cannot be read: the corpus would only seem smaller."""
    above = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{relative}{entry.name}"
            if entry.is_dir():
                if entry.is_symlink() and os.path.realpath(entry.path) in above:
                    raise DataFault(f"a link leads to a folder above it: {entry.path}; remove it")
                yield from _local_files(entry.path, f"{path}/", above)
            elif not entry.name.endswith(FORMATS + INDEXED):
                yield path, 0
            else:
                status = entry.stat()  # a link to nowhere is an error
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_size


def count_endings(paths: Iterable[str]) -> str:
    """How many files there are of each kind: `2 *.jsonl.zst, 1 *.txt`."""
    endings: Counter[str] = Counter()
    for path in paths:
        parts = path.rpartition("/")[2].split(".")
        endings[".".join(parts[-2:] if parts[-1] in PACKED and len(parts) > 2 else parts[-1:])] += 1
    return ", ".join(f"{count} *.{ending}" for ending, count in sorted(endings.items()))
