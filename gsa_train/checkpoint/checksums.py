"""Compute the CRC-32 of files: several threads process parts, whose checksums are then combined."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_BYTES = 1 << 24
PART_BYTES = 1 << 28
"""Bytes that a thread checks at a time. A smaller file has one thread."""
MOST_THREADS = 8
"""Limit per rank, because the ranks of a node compute checksums at the same time."""
POLYNOMIAL = 0xEDB88320
"""The CRC-32 polynomial (IEEE 802.3), lowest power in the highest bit, as in zlib."""


def crc32_of(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    starts = range(0, size, PART_BYTES)
    ends = [min(start + PART_BYTES, size) for start in starts]
    with ThreadPoolExecutor(threads_at_hand()) as threads:
        found = threads.map(functools.partial(crc32_of_range, path), starts, ends)
        parts = [(crc, end - start) for crc, start, end in zip(found, starts, ends, strict=True)]
    return size, joined(parts)


def crc32_of_range(path: Path, start: int, end: int) -> int:
    """Returns the checksum of the bytes [start, end).

    Raises:
        OSError: the bytes cannot be read, or the file has become shorter.
    """
    checksum = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            block = file.read(min(READ_BYTES, end - start))
            if not block:
                raise OSError(f"{path} ends at byte {start}, before {end}")
            checksum = zlib.crc32(block, checksum)
            start += len(block)
    return checksum


def threads_at_hand() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """Returns the checksum of concatenated parts from each part's (checksum, length in bytes). As in zlib's
    crc32_combine, a checksum is a polynomial over GF(2), and appending n bytes multiplies it by x^8n."""
    whole = 0
    for checksum, length in parts:
        whole = _product(_power_of_bytes(length), whole) ^ checksum
    return whole


@functools.lru_cache(maxsize=4096)
def _power_of_bytes(count: int) -> int:
    """Returns x^(8 count) modulo the polynomial."""
    result, square = 1 << 31, 1 << 23  # x^0, x^8
    while count:
        if count & 1:
            result = _product(square, result)
        square = _product(square, square)
        count >>= 1
    return result


def _product(first: int, second: int) -> int:
    result = 0
    for power in range(31, -1, -1):  # from x^0 on
        if first >> power & 1:
            result ^= second
        second = second >> 1 ^ (POLYNOMIAL if second & 1 else 0)
    return result
