"""Reading a checkpoint's tensors by several threads, and checking the files by what was read.

Every rank notes the checksum of each part that it reads anyway. Together, and with the parts that nobody wanted, they
are the checksums of the whole files, which the manifest has. So a start reads a checkpoint once.
"""

from __future__ import annotations

import io
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import ReadItem
from torch.futures import Future

from gsa_train.checkpoint.checksums import crc32_of_range, joined, threads_at_hand
from gsa_train.checkpoint.files import FileRecord
from gsa_train.parallel import Parallel

TENSORS = ".distcp"
"""Ending of the files that are checked while they are read."""
READ_THREADS = 4
"""On each rank. Each has one part of a tensor in host memory, twice: as it is on the disk, and as a tensor."""


class Part(NamedTuple):
    file: str
    start: int
    end: int
    crc32: int


@dataclass
class ReadLog:
    """What one rank has read of one checkpoint."""

    checkpoint: Path
    parts: list[Part] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What could not be read; where there are any, so could tensors not be filled."""


_LOG: ContextVar[ReadLog | None] = ContextVar("read_log", default=None)
"""megatron-core makes the readers, and has no argument for it."""


@contextmanager
def noting(log: ReadLog | None) -> Iterator[None]:
    """What is read meanwhile by `ParallelReader`. With a log, what cannot be read is a fault in it instead of an
    error: the ranks come to agree later, and none waits for another that has raised one."""
    token = _LOG.set(log)
    try:
        yield
    finally:
        _LOG.reset(token)


class ParallelReader(FileSystemReader):
    """Torch's, by several threads. Compressed files are refused before (guarded.py)."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        log, lock, folder = _LOG.get(), threading.Lock(), Path(self.path)
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

        def read(item: ReadItem) -> None:
            with torch.cuda.stream(stream):  # a thread has another, which does not wait for this one
                read_one(item)

        def read_one(item: ReadItem) -> None:
            place = self.storage_data[item.storage_index]
            try:
                content = _bytes_of(folder / place.relative_path, place.offset, place.length)
                if log is not None:
                    end = place.offset + place.length
                    log.parts.append(Part(place.relative_path, place.offset, end, zlib.crc32(content)))
                _fill(item, content, planner, lock)
            except Exception as error:
                # Without room for it nothing is known of the file.
                if log is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                log.faults.append(f"{place.relative_path} cannot be read: {_first_line(error)}")
                if item.type == LoadItemType.BYTE_IO:  # megatron-core looks into it
                    with lock:
                        planner.load_bytes(item, _nothing())

        in_order = sorted(plan.items, key=lambda item: self._place_of(item))
        with ThreadPoolExecutor(min(READ_THREADS, threads_at_hand()), "checkpoint-read") as threads:
            for _ in threads.map(read, in_order):  # raises what one of them has
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place_of(self, item: ReadItem) -> tuple[str, int]:
        place = self.storage_data[item.storage_index]
        return place.relative_path, place.offset


def _bytes_of(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(length)
    if len(content) < length:
        raise OSError(f"it ends at byte {start + len(content)}")
    return content


def _fill(item: ReadItem, content: bytes, planner: LoadPlanner, lock: threading.Lock) -> None:
    """Planners are not made for threads."""
    if item.type == LoadItemType.BYTE_IO:
        with lock:
            planner.load_bytes(item, io.BytesIO(content))
        return
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    with lock:
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise ValueError(
                f"{item.storage_index} is {tuple(tensor.size())} instead of {tuple(target.size())}"
            )
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _nothing() -> io.BytesIO:
    content = io.BytesIO()
    torch.save([None], content)  # one object of one rank
    content.seek(0)
    return content


def faults_of_read(log: ReadLog, files: Mapping[str, FileRecord], parallel: Parallel) -> list[str]:
    """What is wrong with these files, by what all ranks have read, and read now of what none has; the same on all
    ranks. Collective."""
    gathered: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(gathered, (log.parts, log.faults))
    known = _by_file(part for parts, _ in gathered for part in parts if part.file in files)
    gaps = [gap for name, record in files.items() for gap in _gaps(name, record.bytes, known[name])]
    mine, faults = _read_gaps(log.checkpoint, gaps[parallel.rank :: parallel.world_size])
    rest: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(rest, (mine, faults))
    known = _by_file(part for parts, _ in (*gathered, *rest) for part in parts)
    faults = [fault for _, found in (*gathered, *rest) for fault in found]
    for name, record in sorted(files.items()):
        parts = list(_one_behind_the_other(known[name]))
        whole = joined((part.crc32, part.end - part.start) for part in parts)
        if sum(part.end - part.start for part in parts) == record.bytes and f"{whole:08x}" != record.crc32:
            faults.insert(0, f"{name} has checksum {whole:08x} instead of {record.crc32}")
    return faults


def _by_file(parts: Iterable[Part]) -> defaultdict[str, list[Part]]:
    """In the order of the files' bytes."""
    found: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        found[part.file].append(part)
    for each in found.values():
        each.sort()
    return found


def _one_behind_the_other(parts: Sequence[Part]) -> Iterator[Part]:
    """Without those that several ranks have read."""
    end = 0
    for part in parts:
        if part.start >= end:
            yield part
            end = part.end


def _gaps(name: str, size: int, parts: Sequence[Part]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for part in _one_behind_the_other(parts):
        if part.start > at:
            yield name, at, part.start
        at = part.end
    if at < size:
        yield name, at, size


def _read_gaps(folder: Path, gaps: Sequence[tuple[str, int, int]]) -> tuple[list[Part], list[str]]:
    def read(gap: tuple[str, int, int]) -> Part | str:
        name, start, end = gap
        try:
            return Part(name, start, end, crc32_of_range(folder / name, start, end))
        except OSError as error:
            return f"{name} cannot be read: {error}"

    with ThreadPoolExecutor(threads_at_hand()) as threads:
        found = list(threads.map(read, gaps))
    return [each for each in found if isinstance(each, Part)], [
        each for each in found if isinstance(each, str)
    ]


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
