"""Reads and writes small files that stay intact through crashes and full disks."""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json, read_whole

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without POSIX locks."""


def read_named(option: str, path: Path) -> str:
    """Read the text of a file that the user names by an option, without a byte order mark.

    Raises:
        ValueError: the file is missing, not UTF-8 text, not a regular file, or too large. The error names the option
            and the remedy.
    """
    try:
        return read_whole(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8 text ({error}); give a text file") from error
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    except OSError as error:
        raise ValueError(
            f"{option} {path}: cannot be read ({error.strerror}); give a file that is there"
        ) from error


def own_file(path: str, flags: int) -> int:
    """Open a regular file of the run folder. Pass this function to `open` as `opener`. Parent folders may be links.

    A symbolic link is refused because its target may be any file of the user. A pipe is refused because it would
    block.

    Raises:
        OSError: the path is a link, or not a regular file.
    """
    what = "not a plain file"
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a link" if error.errno == errno.ELOOP else what
    raise OSError(
        errno.EPERM, f"it is {what}, and a run writes plain files only; remove it or move it away", str(path)
    )


def open_to_append(path: Path) -> FileIO:
    """Open a file unbuffered for reading and appending.

    If a kill or a full disk cut off the last line, a line break is appended. If the file has other hard links (as from
    `cp -l`), this path gets its own copy, and the other links keep the original.

    Raises:
        OSError: see `own_file`; or the file cannot be written.
    """
    file = FileIO(path, "a+b", opener=own_file)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.seek(0)
        content = file.readall()
        file.close()
        write_atomically(path, content)
        file = FileIO(path, "a+b", opener=own_file)
    if file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
        file.write(b"\n")
    return file


def append_line(path: Path, line: str) -> None:
    """Append one line. Raises OSError: see `open_to_append`."""
    with open_to_append(path) as file:
        content = (line + "\n").encode()
        while content:  # on an almost full disk a write may be partial, and the next one fails
            content = content[file.write(content) :]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: after a crash the file has either the old or the new content. If the path is a link,
    only the link is replaced, not its target."""
    temporary = path.with_name(path.name + ".tmp")
    write_durably(temporary, content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk. If the path is a link, only the link is replaced."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, with its CRC-32 in the key `crc32`."""
    write_atomically(path, json.dumps({**content, "crc32": _checksum(content)}, indent=2) + "\n")


def read_checked(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read a file that `write_checked` wrote, and remove the checksum.

    Raises:
        ValueError: the content is not an object with exactly `keys`, or does not match its checksum.
    """
    content = parse_json(read_whole(path))
    if not isinstance(content, dict):
        raise ValueError(f"it holds no {', '.join(keys)}")
    checksum = content.pop("crc32", None)
    if content.keys() != set(keys):
        raise ValueError(f"it holds {', '.join(content) or 'nothing'} instead of {', '.join(keys)}")
    if checksum != _checksum(content):
        raise ValueError("its checksum does not match its content")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
