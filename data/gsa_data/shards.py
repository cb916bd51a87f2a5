"""Which shards a corpus has, and the lines of one shard. Local folders and every address fsspec knows."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import fsspec
import zstandard
from fsspec.exceptions import FSTimeoutError

OnBadShard = Literal["fail", "skip"]

RETRIES = 5
BACKOFF_SECONDS = 0.5  # doubles: 0.5, 1, 2, 4, 8, so a shard is given up after about 16 s


class DataFault(RuntimeError):
    """The corpus cannot be read as asked; the message names the shard, the value and the remedy."""


@dataclass(frozen=True)
class Manifest:
    """The shards of one split, in a fixed order.

    `shards` holds ((path relative to root, size in bytes), ...), sorted by path. `root` is not part of the
    fingerprint, so a corpus may be moved or copied between runs.
    """

    root: str
    shards: tuple[tuple[str, int], ...]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.shards).encode()).hexdigest()

    @cached_property
    def size_bytes_of(self) -> dict[str, int]:
        return dict(self.shards)


def build_manifest(root: str, pattern: str = "**/*.jsonl.zst") -> Manifest:
    """List the shards under `root` (a folder or an fsspec address such as s3://bucket/folder).

    Raises DataFault when the folder is missing or nothing in it matches `pattern`.
    """
    filesystem, base = fsspec.core.url_to_fs(root)
    if not filesystem.exists(base):
        raise DataFault(f"data folder {root!r} does not exist; check the path, or build a corpus there first")
    found = filesystem.glob(f"{base.rstrip('/')}/{pattern}", detail=True)
    shards = sorted(
        (path[len(base) :].lstrip("/"), int(info["size"]))
        for path, info in found.items()
        if info["type"] == "file"
    )
    if not shards:
        raise DataFault(
            f"data folder {root!r} holds no file that matches {pattern!r}; "
            "name the folder of the split itself, or another pattern"
        )
    return Manifest(root, tuple(shards))


def read_lines(
    manifest: Manifest,
    relpath: str,
    on_bad_shard: OnBadShard,
    counters: Counter[str],
    retries: int = RETRIES,
    backoff_seconds: float = BACKOFF_SECONDS,
) -> list[bytes]:
    """All lines of one shard, without their newline.

    Read errors are retried. A shard that is missing, unreadable, truncated, corrupt or of another size than
    in the manifest raises DataFault with on_bad_shard="fail"; "skip" keeps the lines that are whole.
    `counters` gains read_retries, shards_read, shards_missing, shards_unreadable and shards_damaged.
    """
    address = f"{manifest.root.rstrip('/')}/{relpath}"
    try:
        packed = _read_bytes(address, counters, retries, backoff_seconds)
    except (OSError, FSTimeoutError) as error:
        missing = isinstance(error, FileNotFoundError)
        counters["shards_missing" if missing else "shards_unreadable"] += 1
        if on_bad_shard == "skip":
            return []
        trouble = "is missing" if missing else f"cannot be read after {retries} retries ({error!r})"
        raise DataFault(f"shard {address} {trouble}; restore it, or set on_bad_shard=skip") from error

    text, whole = _decompress(packed)
    trouble = "" if whole else f"is truncated or corrupt after {len(text)} bytes of text"
    expected_bytes = manifest.size_bytes_of[relpath]
    if len(packed) != expected_bytes:
        trouble = f"has {len(packed)} bytes where the manifest says {expected_bytes}"
    counters["shards_read"] += 1
    lines = text.split(b"\n")
    tail = lines.pop()  # empty after a final newline
    if trouble:
        counters["shards_damaged"] += 1
        if on_bad_shard == "fail":
            raise DataFault(f"shard {address} {trouble}; restore it, or set on_bad_shard=skip")
    if tail and whole:
        lines.append(tail)
    return lines


def _read_bytes(address: str, counters: Counter[str], retries: int, backoff_seconds: float) -> bytes:
    for attempt in range(retries + 1):
        try:
            with fsspec.open(address, "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise  # waiting does not bring it back
        except (OSError, FSTimeoutError):
            if attempt == retries:
                raise
            counters["read_retries"] += 1
            time.sleep(backoff_seconds * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _decompress(packed: bytes) -> tuple[bytes, bool]:
    """The text of all zstd frames and whether the last frame is complete; an empty file is not."""
    parts: list[bytes] = []
    rest = packed
    while True:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            # In pieces, so that a corrupt block costs only itself and what follows.
            for start in range(0, len(rest), 1 << 16):
                parts.append(frame.decompress(rest[start : start + (1 << 16)]))
                if frame.eof:
                    rest = frame.unused_data + rest[start + (1 << 16) :]
                    break
        except zstandard.ZstdError:
            return b"".join(parts), False
        if not frame.eof:
            return b"".join(parts), False
        if not rest:
            return b"".join(parts), True
