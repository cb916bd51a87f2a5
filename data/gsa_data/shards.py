"""List the shards of a corpus, and read the lines of one shard, from local folders and fsspec addresses."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gsa_data.copies import find_copies
from gsa_data.faults import DEFAULT_READING, DataFault, Reading, warn_once
from gsa_data.fetch import file_system, read_bytes
from gsa_data.listing import FORMATS, OTHER_FORMATS, list_files, retried
from gsa_data.parquet import require_pyarrow
from gsa_data.unpack import unpack


@dataclass(frozen=True)
class Manifest:
    """Holds the shards of one split, in a fixed order.

    `shards` holds ((path relative to root, size in bytes), ...), sorted by path. The fingerprint does not depend on
    `root`, so a corpus may be moved or copied between runs.
    """

    root: str
    shards: tuple[tuple[str, int], ...]
    text_field: str = "text"
    """The field or column of a document's text"""
    duplicates: tuple[str, ...] = ()
    """The shards left out because another shard has the same content"""
    is_chat: bool = False
    """Whether a line is a conversation (chat.py)"""
    mixed_documents: int = 0
    """Number of documents if each shard belongs to one source (indexed datasets in sub-folders), else 0"""

    @cached_property
    def fingerprint(self) -> str:
        content: Any = self.shards if self.text_field == "text" else [self.text_field, self.shards]
        if self.is_chat:
            content = ["chat", self.shards]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def size_bytes_of(self) -> dict[str, int]:
        return dict(self.shards)


def build_manifest(root: str, text_field: str = "text", reading: Reading = DEFAULT_READING) -> Manifest:
    """List the shards of text below `root`: all files of FORMATS, or else all files of OTHER_FORMATS.

    Args:
        root: a folder or an fsspec address such as s3://bucket/folder
        reading: policy for shards with the same text under two names; the default refuses them

    Raises DataFault if the folder cannot be listed completely or has no shard, if a needed package is not installed, or
    if a shard has a copy and `reading` does not skip copies.
    """
    return manifest_of(root, list_files(root, reading), text_field, reading)


def manifest_of(
    root: str, files: Mapping[str, int], text_field: str, reading: Reading, is_chat: bool = False
) -> Manifest:
    """Build the manifest from the files that `list_files` found below `root`."""
    for formats in (FORMATS, OTHER_FORMATS):
        shards = sorted((path, size_bytes) for path, size_bytes in files.items() if path.endswith(formats))
        if shards:
            break
    else:
        raise DataFault(
            f"data folder {root!r} holds no file that matches *{', *'.join(FORMATS + OTHER_FORMATS)}, *.idx; name the "
            "folder of the split itself"
        )
    if parquet := next((relpath for relpath, _ in shards if relpath.endswith(".parquet")), None):
        require_pyarrow(parquet)
    filesystem, base = file_system(root, reading)
    copies = retried(lambda pulse: find_copies(filesystem, base.rstrip("/"), shards, pulse), root, reading)
    troubles = [copy.trouble for copy in copies.values() if copy.has_text]
    if troubles and reading.on_bad_shard == "fail":
        more = f", and {len(troubles) - 1} more such" if len(troubles) > 1 else ""
        raise DataFault(
            f"data folder {root!r} holds a shard twice: {troubles[0]}{more}; remove one of the two{reading.or_skip}"
        )
    for trouble in troubles:
        warn_once(f"data folder {root!r}: left out, {trouble}")
    return Manifest(
        root,
        tuple(shard for shard in shards if shard[0] not in copies),  # equal under either policy
        text_field,
        tuple(sorted(copies)) if reading.on_bad_shard == "skip" else (),
        is_chat,
    )


def read_shard(manifest: Manifest, relpath: str, reading: Reading, counters: Counter[str]) -> bytes | None:
    """Read the stored bytes of one shard. Returns None if the shard is skipped.

    Failed reads are tried again. With on_bad_shard="fail", a missing or unreadable shard raises DataFault. `counters`
    counts read_retries, shards_read, shards_missing and shards_unreadable.
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
    """Read all lines of one shard of JSON lines, without newlines and byte order mark.

    `read_shard` handles a missing or unreadable shard. A shard is damaged if it is truncated, corrupt or too large when
    unpacked, or if its size differs from the manifest. With on_bad_shard="skip", a damaged shard increments
    shards_damaged, and its complete lines are kept.
    """
    packed = read_shard(manifest, relpath, reading, counters)
    if packed is None:
        return []
    text, trouble = unpack(packed, relpath)
    whole = not trouble
    check_damage(manifest, relpath, len(packed), trouble, reading, counters)
    lines = text.split(b"\n")
    tail = lines.pop()  # empty after a final newline
    if tail and whole:
        lines.append(tail)
    if lines:
        lines[0] = lines[0].removeprefix(BOM_UTF8)  # from Windows programs
    return lines


def check_damage(
    manifest: Manifest,
    relpath: str,
    packed_bytes: int,
    trouble: str,
    reading: Reading,
    counters: Counter[str],
) -> None:
    """Apply the policy to a shard that was read. `trouble` describes its damage, or is empty."""
    expected_bytes = manifest.size_bytes_of[relpath]
    if packed_bytes != expected_bytes:
        trouble = f"has {packed_bytes} bytes where the manifest says {expected_bytes}"
    if trouble:
        refuse(f"{manifest.root.rstrip('/')}/{relpath}", trouble, "shards_damaged", reading, counters)


def refuse(shard: str, trouble: str, counter: str, reading: Reading, counters: Counter[str]) -> None:
    """Count and log a bad shard, or raise DataFault."""
    if reading.on_bad_shard == "fail":
        raise DataFault(f"shard {shard} {trouble}; restore it{reading.or_skip}")
    counters[counter] += 1
    warn_once(f"shard {shard} {trouble}: what is bad of it is left out")
