"""Find duplicate shards: files with the same content, and compressed files next to their decompressed copies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from gsa_data.fetch import Pulse
from gsa_data.listing import FORMATS
from gsa_data.parquet import has_no_rows
from gsa_data.unpack import unpack

COMPARED_BYTES = 1 << 20
"""Shards of equal size are compared by this number of bytes at their start and end."""

Shard = tuple[str, int]
"""The path and the size in bytes"""


class Copy(NamedTuple):
    trouble: str
    """A description of the fault"""
    has_text: bool
    """False for a file without documents. Filters and Spark write many identical files of this kind."""


def find_copies(filesystem: Any, base: str, shards: Sequence[Shard], pulse: Pulse) -> dict[str, Copy]:
    """Returns the shards below the folder `base` that duplicate an earlier shard, by path.

    The function reads only shards with equal sizes, or with equal names except for the format's suffix.
    """
    same_content = {
        copy: Copy(f"{copy} is a copy of {original} (same size, same first and last MiB)", has_text)
        for copy, original, has_text in _same_content(filesystem, base, shards, pulse)
    }
    same_text = {
        copy: Copy(f"{copy} is a copy of {original} (same text at their beginning)", True)
        for copy, original in _same_text(filesystem, base, shards, pulse)
    }
    return same_text | same_content


def _same_content(
    filesystem: Any, base: str, shards: Sequence[Shard], pulse: Pulse
) -> Iterator[tuple[str, str, bool]]:
    """Yields (copy, original, whether they hold text) among files of equal size."""
    by_size: dict[int, list[str]] = {}
    for relpath, size_bytes in shards:
        by_size.setdefault(size_bytes, []).append(relpath)
    alike = [(size, path) for size, paths in by_size.items() if size and len(paths) > 1 for path in paths]
    first_with: dict[tuple[int, bytes], str] = {}
    for begin in range(0, len(alike), 32):  # remote file systems fetch a batch concurrently
        batch = alike[begin : begin + 32]
        paths = [f"{base}/{relpath}" for _, relpath in batch for _ in range(2)]
        starts = [start for size, _ in batch for start in (0, max(0, size - COMPARED_BYTES))]
        ends = [end for size, _ in batch for end in (min(size, COMPARED_BYTES), size)]
        ranges = filesystem.cat_ranges(paths, starts, ends, on_error="raise")
        pulse.beat()
        for number, (size_bytes, relpath) in enumerate(batch):
            digest = hashlib.sha256(bytes(ranges[2 * number]) + bytes(ranges[2 * number + 1])).digest()
            original = first_with.setdefault((size_bytes, digest), relpath)
            if original != relpath:
                is_whole = size_bytes <= COMPARED_BYTES
                yield relpath, original, not (is_whole and _is_empty(bytes(ranges[2 * number]), relpath))


def _is_empty(content: bytes, relpath: str) -> bool:
    if relpath.endswith(".parquet"):
        return has_no_rows(content, relpath)
    text, trouble = unpack(content, relpath)
    return not trouble and not text.strip()


def _same_text(
    filesystem: Any, base: str, shards: Sequence[Shard], pulse: Pulse
) -> Iterator[tuple[str, str]]:
    """Yields (copy, original) among JSON lines of the same name. `zstd -d` leaves both a.jsonl and a.jsonl.zst."""
    by_stem: dict[str, list[Shard]] = {}
    for relpath, size_bytes in shards:
        for ending in FORMATS:
            if relpath.endswith(ending) and size_bytes and ending != ".parquet":
                by_stem.setdefault(relpath.removesuffix(ending), []).append((relpath, size_bytes))
    for alike in by_stem.values():
        if len(alike) == 1:
            continue
        paths = [f"{base}/{relpath}" for relpath, _ in alike]
        ends = [min(size_bytes, COMPARED_BYTES) for _, size_bytes in alike]
        ranges = filesystem.cat_ranges(paths, [0] * len(alike), ends, on_error="raise")
        pulse.beat()
        texts = [
            (relpath, unpack(bytes(begin), relpath, COMPARED_BYTES)[0])
            for (relpath, _), begin in zip(alike, ranges, strict=True)
        ]
        for (original, text), (copy, its_text) in combinations(texts, 2):
            compared = min(len(text), len(its_text), COMPARED_BYTES)
            if compared and text[:compared] == its_text[:compared]:
                yield copy, original
