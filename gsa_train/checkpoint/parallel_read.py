"""Read a checkpoint's tensors with several threads, and check the files at the same time.

Every rank records the checksum of each file part that it loads. The ranks then read the remaining parts only for their
checksums. The checksums of all parts give the checksum of the whole file, which is compared with the manifest. A start
therefore checks a checkpoint without reading it a second time.
"""

from __future__ import annotations

import io
import socket
import struct
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import ReadItem
from torch.futures import Future

from gsa_train.checkpoint.checksums import crc32_of_range, joined, threads_at_hand
from gsa_train.checkpoint.files import FileRecord
from gsa_train.distributed.objects import gathered
from gsa_train.distributed.parallel import Parallel

TENSORS = ".distcp"
"""Suffix of the files that are checked while they are read."""


class NotRead(RuntimeError):
    """A checkpoint is intact on disk, but some rank could not read it correctly. All ranks raise this error. The fault
    lies in a rank's memory, device or file system, so the checkpoint is kept."""


class Part(NamedTuple):
    file: str
    start: int
    end: int
    crc32: int


class Fault(NamedTuple):
    file: str
    what: str


@dataclass
class ReadLog:
    checkpoint: Path
    parts: list[Part] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """Faults of reading or loading. The tensors concerned are not filled."""
    metadata: Metadata | None = None
    """Torch's metadata, once a reader has read and checked it. A load has several readers."""


_LOG: ContextVar[ReadLog | None] = ContextVar("read_log", default=None)
"""The current log. megatron-core creates the readers, and cannot pass a log to them."""


@contextmanager
def noting(log: ReadLog | None) -> Iterator[None]:
    """Record in `log`, inside this context, what `ParallelReader` reads. None: record nothing.

    If `log` is given, a failed read raises no error, because an error would leave the other ranks waiting. The log
    records a fault instead, and the ranks exchange faults later.
    """
    token = _LOG.set(log)
    try:
        yield
    finally:
        _LOG.reset(token)


def log_of(checkpoint: Path) -> ReadLog | None:
    """Returns the log of the current load, if it has one and reads this checkpoint."""
    log = _LOG.get()
    return log if log is not None and log.checkpoint == checkpoint else None


class ParallelReader(FileSystemReader):
    """Reads like torch's reader, but with several threads. Compressed files are refused earlier (guarded.py)."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        log, lock, folder = _LOG.get(), threading.Lock(), Path(self.path)
        memory = _ThreadMemory()
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

        def read(item: ReadItem) -> None:
            place = self.storage_data[item.storage_index]
            try:
                content = memory.of(place.length)
                _read_into(content, folder / place.relative_path, place.offset)
                if log is not None:
                    end = place.offset + place.length
                    log.parts.append(Part(place.relative_path, place.offset, end, zlib.crc32(content)))
                # A new thread has its own stream, which does not wait for this thread's stream.
                with torch.cuda.stream(stream):
                    _fill(item, content, planner, lock)
            except Exception as error:
                if log is None:
                    raise
                log.faults.append(Fault(place.relative_path, f"cannot be read: {first_line(error)}"))
                if item.type == LoadItemType.BYTE_IO:  # megatron-core reads its content
                    with lock:
                        planner.load_bytes(item, _nothing())

        place_of = attrgetter("relative_path", "offset")
        in_order = sorted(plan.items, key=lambda item: place_of(self.storage_data[item.storage_index]))
        with ThreadPoolExecutor(threads_at_hand(), "checkpoint-read") as threads:
            for _ in threads.map(read, in_order):  # raises a thread's error
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _ThreadMemory(threading.local):
    """Holds one thread's read buffer, which grows to the largest part that the thread reads. It is reused, because
    allocating a buffer takes longer than reading."""

    buffer = bytearray()

    def of(self, length: int) -> memoryview:
        """Returns a view of the buffer, valid until the next call."""
        if len(self.buffer) < length:
            self.buffer = bytearray(length)
        return memoryview(self.buffer)[:length]


def _read_into(content: memoryview, path: Path, start: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        found = 0
        while found < len(content):
            more = file.readinto(content[found:])
            if not more:
                raise OSError(f"it ends at byte {start + found}")
            found += more


def _fill(item: ReadItem, content: memoryview, planner: LoadPlanner, lock: threading.Lock) -> None:
    """Load one item into its tensor. The lock guards the planner, which is not thread-safe."""
    if item.type == LoadItemType.BYTE_IO:
        with lock:
            planner.load_bytes(item, io.BytesIO(content))
        return
    tensor = _tensor_in(content)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    with lock:
        target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ValueError(f"{item.storage_index} is {tuple(tensor.size())} instead of {tuple(target.size())}")
    target.copy_(tensor)
    with lock:
        planner.commit_tensor(item, target)


def _tensor_in(content: memoryview) -> torch.Tensor:
    """Returns the tensor that torch saved, as a view of these bytes.

    `torch.save` writes a ZIP archive, uncompressed, in which each storage is a file named data/0 and so on.
    """
    with torch.serialization.skip_data():  # dtype, shape and strides, with an unused storage
        saved = torch.load(_file_over(content), map_location="cpu", weights_only=True)
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"it is a {type(saved).__name__} and not a tensor")
    if saved.numel() == 0:
        return saved
    with zipfile.ZipFile(_file_over(content)) as archive:
        storages = [each for each in archive.infolist() if "/data/" in each.filename]
    if len(storages) != 1 or storages[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is not one uncompressed tensor")
    header = storages[0].header_offset
    # A header has 30 bytes; the last four are the lengths of the two fields that follow it.
    start = header + 30 + sum(struct.unpack_from("<HH", content, header + 26))
    elements = saved.untyped_storage().nbytes() // saved.element_size()
    stored = torch.frombuffer(content, dtype=saved.dtype, count=elements, offset=start)
    return stored.as_strided(saved.size(), saved.stride(), saved.storage_offset())


def _file_over(content: memoryview) -> BinaryIO:
    """Returns a file over these bytes; io.BytesIO would copy them."""
    return io.BufferedReader(_Bytes(content))


class _Bytes(io.RawIOBase):
    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at


def _nothing() -> io.BytesIO:
    content = io.BytesIO()
    torch.save([None], content)  # one object of one rank
    content.seek(0)
    return content


def faults_of_read(log: ReadLog, files: Mapping[str, FileRecord], parallel: Parallel) -> list[str]:
    """Returns the faults of these files, the same on all ranks. Collective.

    This function also reads the parts of the files that no rank has read.

    Raises:
        NotRead: the files are intact, but some rank could not load all of them, or read different bytes.
    """
    found = gathered((socket.gethostname(), log.parts, log.faults))
    agreed, disputed = _agreed(part for _, parts, _ in found for part in parts if part.file in files)
    gaps = [gap for name, record in files.items() for gap in _gaps(name, record.bytes, agreed[name])]
    mine = _read_gaps(log.checkpoint, gaps[parallel.rank :: parallel.world_size])
    rest = [each for of_rank in gathered(mine) for each in of_rank]
    for part in rest:
        if isinstance(part, Part):
            agreed[part.file].append(part)
    damaged, intact = [], set()
    for name, record in sorted(files.items()):
        parts = list(_without_nested(sorted(agreed[name])))
        whole = joined((part.crc32, part.end - part.start) for part in parts)
        is_whole = sum(part.end - part.start for part in parts) == record.bytes
        if is_whole and f"{whole:08x}" == record.crc32:
            intact.add(name)
        elif is_whole:
            damaged.append(f"{name} has checksum {whole:08x} instead of {record.crc32}")
    of_ranks = [(f"rank {rank} on {each[0]}", fault) for rank, each in enumerate(found) for fault in each[2]]
    all_faults = [fault for _, fault in of_ranks] + [each for each in rest if isinstance(each, Fault)]
    damaged += [f"{fault.file} {fault.what}" for fault in all_faults if fault.file not in intact]
    made_of_it = [f"{rank}: {fault.file} {fault.what}" for rank, fault in of_ranks]
    made_of_it += [f"ranks have read different bytes of {name} from {a} to {b}" for name, a, b in disputed]
    if made_of_it and not damaged:
        more = f" (and {len(made_of_it) - 1} more)" if made_of_it[1:] else ""
        raise NotRead(
            f"{log.checkpoint} is intact by its checksums, but not what was read of it: {made_of_it[0]}{more}. The "
            "memory, the device or the file system of a node is at fault; the same command tries again"
        )
    return damaged


def _agreed(
    parts: Iterable[Part],
) -> tuple[defaultdict[str, list[Part]], list[tuple[str, int, int]]]:
    """Returns the parts whose checksum is the same on all ranks that read them, by file in byte order, and the other
    parts."""
    checksums: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
    for part in parts:
        checksums[part[:3]].add(part.crc32)
    agreed: defaultdict[str, list[Part]] = defaultdict(list)
    for place, found in sorted(checksums.items()):
        if len(found) == 1:
            agreed[place[0]].append(Part(*place, *found))
    return agreed, [place for place, found in sorted(checksums.items()) if len(found) > 1]


def _without_nested(parts: Sequence[Part]) -> Iterator[Part]:
    """Yields the parts in order, without parts inside another part."""
    end = 0
    for part in parts:
        if part.start >= end:
            yield part
            end = part.end


def _gaps(name: str, size: int, parts: Sequence[Part]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for part in _without_nested(parts):
        if part.start > at:
            yield name, at, part.start
        at = part.end
    if at < size:
        yield name, at, size


def _read_gaps(folder: Path, gaps: Sequence[tuple[str, int, int]]) -> list[Part | Fault]:
    def read(gap: tuple[str, int, int]) -> Part | Fault:
        name, start, end = gap
        try:
            return Part(name, start, end, crc32_of_range(folder / name, start, end))
        except OSError as error:
            return Fault(name, f"cannot be read: {error}")

    with ThreadPoolExecutor(threads_at_hand()) as threads:
        return list(threads.map(read, gaps))


def first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
