"""From a compressed shard to its text, as far as it is whole."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import zstandard

LARGEST_WINDOW_BYTES = 1 << 31
"""What `zstd --long=31` asks for, the most there is; the library's own limit of 128 MiB is that of `--long` alone."""


class _Frame(Protocol):
    """One compressed frame: zstandard's and zlib's objects alike."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def unpack(packed: bytes, relpath: str) -> tuple[bytes, bool]:
    """The text of a shard, and whether it is all there."""
    if relpath.endswith(".zst"):
        decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
        return _decompress(packed, decompressor.decompressobj)
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
