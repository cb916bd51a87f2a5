"""Decompress a shard up to the first damage."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import zstandard

LARGEST_WINDOW_BYTES = 1 << 31
"""The largest window of zstd (`--long=31`). The library's default limit is smaller."""
MOST_UNPACKED_BYTES = 1 << 30
"""Any shard may unpack to this size. Above this size MOST_RATIO is the limit, because a reader holds a shard in memory,
and a few packed bytes may unpack to any size."""
MOST_RATIO = 50
"""The largest ratio of unpacked to packed bytes of larger shards. Text has 3 to 10."""
LINE_BYTES = 64
"""Memory of a line or row in addition to its text"""
PIECE_BYTES = 1 << 12
"""Packed bytes per call, which may unpack to 128 MiB"""


def most_unpacked(packed_bytes: int) -> int:
    """Returns the bytes that a packed shard may take in memory: its text, and LINE_BYTES for each line."""
    return max(MOST_UNPACKED_BYTES, MOST_RATIO * packed_bytes)


def too_large(packed_bytes: int) -> str:
    """Returns the text of the fault of a shard that exceeds `most_unpacked`."""
    return (
        f"unpacks to more than {most_unpacked(packed_bytes)} bytes in memory, the most allowed for its "
        f"{packed_bytes} bytes (split it into smaller shards if its text is meant so)"
    )


def unpack(packed: bytes, relpath: str, enough_bytes: int | None = None) -> tuple[bytes, str]:
    """Returns the text of a shard, and a description of its damage ("" if it is intact).

    Unpacking ends after `enough_bytes` of text, or at the size limit.
    """
    if relpath.endswith(".zst"):
        decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
        return _decompress(packed, decompressor.decompressobj, enough_bytes)
    if relpath.endswith(".gz"):  # wbits=31 expects gzip's header and checksum
        return _decompress(packed, lambda: zlib.decompressobj(wbits=31), enough_bytes)
    return packed, ""


def _decompress(packed: bytes, new_frame: Callable[[], Any], enough_bytes: int | None) -> tuple[bytes, str]:
    """Returns the text of all frames and the damage. An empty file has no frame.

    Args:
        new_frame: returns a decompressor of zstandard or zlib
    """
    parts: list[bytes] = []
    held = text_bytes = place = 0
    most = most_unpacked(len(packed))
    while True:
        frame = new_frame()
        try:
            # Decompress in pieces to keep the text before a corrupt block.
            while place < len(packed) and not frame.eof:
                piece = packed[place : place + PIECE_BYTES]
                part = frame.decompress(piece)
                place += len(piece)
                text_bytes += len(part)
                held += len(part) + LINE_BYTES * part.count(b"\n")
                if held > most:
                    return b"".join(parts), too_large(len(packed))
                parts.append(part)
                if enough_bytes is not None and text_bytes >= enough_bytes:
                    return b"".join(parts), ""
        except (zstandard.ZstdError, zlib.error):
            break
        if not frame.eof:
            break
        place -= len(frame.unused_data)
        if place == len(packed) or (packed[place] == 0 and not packed[place:].strip(b"\0")):
            return b"".join(parts), ""  # gzip files may be padded with zeros
    return b"".join(parts), f"is truncated or corrupt after {text_bytes} bytes of text"
