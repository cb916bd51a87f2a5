"""List the files below a folder or an fsspec address."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from gsa_data.faults import DataFault, Reading
from gsa_data.fetch import Pulse, file_system, patiently

FORMATS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")
"""Suffixes of shards of text"""
OTHER_FORMATS = (".json.gz",)
"""Suffix of C4's shards, which are JSON lines. Files with this suffix count as shards only if the folder has no file of
FORMATS. Otherwise they probably have another purpose."""
INDEXED = (".idx", ".bin")
"""Suffixes of megatron-core's datasets"""
PACKED = ("zst", "gz", "bz2", "xz", "lz4")
"""Suffixes of compression, which follow the suffix of the content"""

T = TypeVar("T")


def list_files(root: str, reading: Reading) -> dict[str, int]:
    """Returns path -> size in bytes of every file below `root`. Files of unknown formats have size 0.

    Raises DataFault if `root` is not a folder, or a part of it cannot be listed.
    """
    filesystem, base = file_system(root, reading)
    base = base.rstrip("/")
    is_local = isinstance(filesystem, LocalFileSystem)

    def listing(pulse: Pulse) -> dict[str, int]:
        try:
            os.listdir(base or "/") if is_local else filesystem.ls(base, detail=False)
        except FileNotFoundError:  # only for the root; inside the folder a broken link raises an error
            raise DataFault(
                f"data folder {root!r} does not exist; check the path, or build a corpus there first"
            ) from None
        except NotADirectoryError:
            raise DataFault(f"{root!r} is a file; give the folder it lies in") from None
        return dict(_local_files(base, pulse) if is_local else _remote_files(filesystem, base, base, pulse))

    found = retried(listing, root, reading)
    for path in found:
        if path.endswith(FORMATS + OTHER_FORMATS) and ("::" in path or not path.isprintable()):
            raise DataFault(
                f"{path!r} in {root!r} cannot be addressed; rename it without '::' and control characters"
            )
    return found


def retried(action: Callable[[Pulse], T], root: str, reading: Reading) -> T:
    """Run `action` and return its result. After a stall or a transient error, try again. Raises DataFault if no try
    succeeds."""
    try:
        return patiently(action, f"data folder {root!r}", reading, Counter())
    except OSError as error:
        raise DataFault(
            f"data folder {root!r} cannot be read ({type(error).__name__}: {error}); check address and access, and "
            "that its server answers"
        ) from error


def _local_files(
    folder: str, pulse: Pulse, relative: str = "", above: tuple[str, ...] = ()
) -> Iterator[tuple[str, int]]:
    """Yields (path, size in bytes) for each file below a local folder, and follows links. Files that are not shards
    get size 0. fsspec's listing would silently skip links and unreadable folders."""
    folder = folder or "/"
    above = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        for entry in entries:
            pulse.beat()
            path = f"{relative}{entry.name}"
            if entry.is_dir():
                if entry.is_symlink() and os.path.realpath(entry.path) in above:
                    raise DataFault(f"a link leads to a folder above it: {entry.path}; remove it")
                yield from _local_files(entry.path, pulse, f"{path}/", above)
            elif not entry.name.endswith(FORMATS + OTHER_FORMATS + INDEXED):
                yield path, 0
            else:
                status = entry.stat()  # a broken link is an error
                if not stat.S_ISREG(status.st_mode):
                    raise DataFault(
                        f"{entry.path!r} has the name of a shard, and is a pipe, a socket or a device; remove it"
                    )
                yield path, status.st_size


def _remote_files(filesystem: Any, base: str, folder: str, pulse: Pulse) -> Iterator[tuple[str, int]]:
    """Yields (path, size in bytes) for each file in a remote folder, with one request per folder. fsspec's `find` is
    not used, because it skips unreadable folders and shows no progress."""
    for info in filesystem.ls(folder, detail=True):
        pulse.beat()
        path = str(info["name"]).rstrip("/")
        kind = info.get("type", "file")
        if kind == "directory" and path != folder:
            yield from _remote_files(filesystem, base, path, pulse)
        elif kind == "file":
            size = info.get("size")
            if size is None and path.endswith(FORMATS + OTHER_FORMATS + INDEXED):
                size = filesystem.size(path)  # a web server's listing has only names
                if size is None:
                    raise DataFault(
                        f"{path}: its server does not tell the size; copy the shards, or mount them"
                    )
            yield path[len(base) :].lstrip("/"), int(size or 0)


def count_endings(paths: Iterable[str]) -> str:
    """Returns the number of files of each kind, such as `2 *.jsonl.zst, 1 *.txt`."""
    endings: Counter[str] = Counter()
    for path in paths:
        parts = path.rpartition("/")[2].split(".")
        endings[".".join(parts[-2:] if parts[-1] in PACKED and len(parts) > 2 else parts[-1:])] += 1
    return ", ".join(f"{count} *.{ending}" for ending, count in sorted(endings.items()))
