"""Which shards a corpus has, and the lines of one shard. Local folders and every address fsspec knows."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import zstandard

from gsa_data.faults import DataFault as DataFault
from gsa_data.faults import OnBadShard as OnBadShard
from gsa_data.faults import Reading, warn_once
from gsa_data.fetch import file_system, read_bytes, with_retries
from gsa_data.parquet import require_pyarrow

FORMATS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")

COMPARED_BYTES = 1 << 20
"""Shards of one size are compared by this much of their beginning and their end."""


@dataclass(frozen=True)
class Manifest:
    """The shards of one split, in a fixed order.

    `shards` holds ((path relative to root, size in bytes), ...), sorted by path. `root` is not part of the
    fingerprint, so a corpus may be moved or copied between runs.
    """

    root: str
    shards: tuple[tuple[str, int], ...]
    text_field: str = "text"
    """Field or column that holds a document's text."""
    duplicates: tuple[str, ...] = ()
    """Shards left out because another one has the same content."""

    @cached_property
    def fingerprint(self) -> str:
        content: Any = self.shards if self.text_field == "text" else [self.text_field, self.shards]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def size_bytes_of(self) -> dict[str, int]:
        return dict(self.shards)


def build_manifest(
    root: str, pattern: str | None = None, text_field: str = "text", reading: Reading | None = None
) -> Manifest:
    """List the shards under `root` (a folder or an fsspec address such as s3://bucket/folder).

    Args:
        pattern: glob below root; None takes every file in one of FORMATS.
        reading: policy for shards with the same content under two names; the default refuses them.

    Raises DataFault when the folder is missing, nothing in it matches, a package that a format or an address
    needs is not installed, or a shard is there twice and `reading` does not skip it.
    """
    reading = reading or Reading()
    filesystem, base = file_system(root)
    base = base.rstrip("/")

    def listing() -> dict[str, Any] | None:
        if not filesystem.exists(base):
            return None
        found = (
            filesystem.glob(f"{base}/{pattern}", detail=True)
            if pattern
            else filesystem.find(base, detail=True)
        )
        return dict(found)

    found = _remote(listing, root, reading)
    if found is None:
        raise DataFault(f"data folder {root!r} does not exist; check the path, or build a corpus there first")
    shards = sorted(
        (path[len(base) :].lstrip("/"), int(info["size"]))
        for path, info in found.items()
        if info["type"] == "file" and (pattern or path.endswith(FORMATS))
    )
    if not shards:
        wanted = repr(pattern) if pattern else f"*{', *'.join(FORMATS)}"
        raise DataFault(
            f"data folder {root!r} holds no file that matches {wanted}; "
            "name the folder of the split itself, or another pattern"
        )
    for relpath, _ in shards:
        if relpath.endswith(".parquet"):
            require_pyarrow(relpath)
            break
    copies = _remote(lambda: _find_copies(filesystem, base, shards), root, reading)
    for copy, original in copies.items():
        trouble = f"{copy} is a copy of {original} (same size, same first and last MiB)"
        if reading.on_bad_shard == "fail":
            raise DataFault(
                f"data folder {root!r} holds a shard twice: {trouble}, and {len(copies) - 1} more such; remove "
                "one of the two, or set on_bad_shard=skip to leave copies out"
            )
        warn_once(f"data folder {root!r}: left out, {trouble}")
    return Manifest(
        root, tuple(shard for shard in shards if shard[0] not in copies), text_field, tuple(sorted(copies))
    )


def _remote(action: Callable[[], Any], root: str, reading: Reading) -> Any:
    try:
        return with_retries(action, reading, Counter())
    except OSError as error:
        raise DataFault(
            f"data folder {root!r} cannot be read ({error!r}); check address and access"
        ) from error


def _find_copies(filesystem: Any, base: str, shards: list[tuple[str, int]]) -> dict[str, str]:
    """Shards whose content a shard before them has: {copy: original}. Reads only those that share their size."""
    by_size: dict[int, list[str]] = {}
    for relpath, size_bytes in shards:
        by_size.setdefault(size_bytes, []).append(relpath)
    alike = [(size, path) for size, paths in by_size.items() if size and len(paths) > 1 for path in paths]
    copies: dict[str, str] = {}
    first_with: dict[tuple[int, bytes], str] = {}
    for begin in range(0, len(alike), 32):  # a few at once: remote file systems fetch them together
        batch = alike[begin : begin + 32]
        paths = [f"{base}/{relpath}" for _, relpath in batch for _ in range(2)]
        starts = [start for size, _ in batch for start in (0, max(0, size - COMPARED_BYTES))]
        ends = [end for size, _ in batch for end in (min(size, COMPARED_BYTES), size)]
        ranges = filesystem.cat_ranges(paths, starts, ends, on_error="raise")
        for number, (size_bytes, relpath) in enumerate(batch):
            digest = hashlib.sha256(bytes(ranges[2 * number]) + bytes(ranges[2 * number + 1])).digest()
            original = first_with.setdefault((size_bytes, digest), relpath)
            if original != relpath:
                copies[relpath] = original
    return copies


def read_shard(manifest: Manifest, relpath: str, reading: Reading, counters: Counter[str]) -> bytes | None:
    """The bytes of one shard as stored, or None when it is left out.

    Read errors are retried. A shard that is missing or unreadable raises DataFault with on_bad_shard="fail".
    `counters` gains read_retries, shards_read, shards_missing and shards_unreadable.
    """
    address = f"{manifest.root.rstrip('/')}/{relpath}"
    try:
        packed = read_bytes(address, reading, counters)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            refuse(address, "is missing", "shards_missing", reading, counters)
        else:
            trouble = f"cannot be read after {reading.retries} retries ({error!r})"
            refuse(address, trouble, "shards_unreadable", reading, counters)
        return None
    counters["shards_read"] += 1
    return packed


def read_lines(manifest: Manifest, relpath: str, reading: Reading, counters: Counter[str]) -> list[bytes]:
    """All lines of one shard of JSON lines, without their newline.

    Faults are as in `read_shard`; one that is truncated, corrupt or of another size than in the manifest counts
    as shards_damaged, and "skip" keeps the lines that are whole.
    """
    packed = read_shard(manifest, relpath, reading, counters)
    if packed is None:
        return []
    text, whole = _unpack(packed, relpath)
    trouble = "" if whole else f"is truncated or corrupt after {len(text)} bytes of text"
    check_damage(manifest, relpath, len(packed), trouble, reading, counters)
    lines = text.split(b"\n")
    tail = lines.pop()  # empty after a final newline
    if tail and whole:
        lines.append(tail)
    return lines


def check_damage(
    manifest: Manifest,
    relpath: str,
    packed_bytes: int,
    trouble: str,
    reading: Reading,
    counters: Counter[str],
) -> None:
    """Apply the policy to a shard that was read: `trouble` says what is wrong with it, "" nothing."""
    expected_bytes = manifest.size_bytes_of[relpath]
    if packed_bytes != expected_bytes:
        trouble = f"has {packed_bytes} bytes where the manifest says {expected_bytes}"
    if trouble:
        refuse(f"{manifest.root.rstrip('/')}/{relpath}", trouble, "shards_damaged", reading, counters)


def refuse(shard: str, trouble: str, counter: str, reading: Reading, counters: Counter[str]) -> None:
    """Count and log a bad shard, or raise DataFault."""
    if reading.on_bad_shard == "fail":
        raise DataFault(f"shard {shard} {trouble}; restore it, or set on_bad_shard=skip")
    counters[counter] += 1
    warn_once(f"shard {shard} {trouble}: what is bad of it is left out")


class _Frame(Protocol):
    """One compressed frame: zstandard's and zlib's objects alike."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _unpack(packed: bytes, relpath: str) -> tuple[bytes, bool]:
    """The text of a shard, and whether it is all there."""
    if relpath.endswith(".zst"):
        return _decompress(packed, lambda: zstandard.ZstdDecompressor().decompressobj())
    if relpath.endswith(".gz"):
        return _decompress(packed, lambda: zlib.decompressobj(wbits=31))  # 31: gzip's header and checksum
    return packed, True


def _decompress(packed: bytes, new_frame: Callable[[], _Frame]) -> tuple[bytes, bool]:
    """The text of all frames and whether the last frame is complete; an empty file is not."""
    parts: list[bytes] = []
    place = 0
    while True:
        frame = new_frame()
        try:
            # In pieces, so that a corrupt block costs only itself and what follows.
            while place < len(packed) and not frame.eof:
                piece = packed[place : place + (1 << 16)]
                parts.append(frame.decompress(piece))
                place += len(piece)
        except (zstandard.ZstdError, zlib.error):
            return b"".join(parts), False
        if not frame.eof:
            return b"".join(parts), False
        place -= len(frame.unused_data)
        if place == len(packed) or (packed[place] == 0 and not packed[place:].strip(b"\0")):
            return b"".join(parts), True  # gzip files may be padded with zeros
