"""Small files that stay intact through crashes and full disks."""

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

from gsa_data.whole_files import MOST_BYTES, parse_json, read_whole

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without POSIX locks."""


def read_named(option: str, path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read the text of a file that the user names by an option, without a byte order mark.

    Raises:
        ValueError: it is missing, not text, not a regular file, or too large; names the option and the remedy.
    """
    try:
        return read_whole(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8 text ({error}); give a text file") from error
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    except OSError as error:
        raise ValueError(
            f"{option} {path}: cannot be read ({error.strerror}); give a file that is there"
        ) from error


def own_file(path: str, flags: int) -> int:
    """`opener` of `open` for a file that a run keeps: a plain file, never the target of a link, which may be
    any file of the user's, nor a pipe, which would wait for a reader. Parent folders may be links.

    Raises:
        OSError: it is a link, or not a plain file.
    """
    what = "no plain file"
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
    """Open unbuffered for reading and appending; ends a last line that a kill or a full disk has cut off. A file with
    another name (a hard link, as from `cp -l`) is copied first: the other name keeps its content.

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
    """
    Raises:
        OSError: see `open_to_append`.
    """
    with open_to_append(path) as file:
        content = (line + "\n").encode()
        while content:  # on an almost full disk a write may be partial, and the next one fails
            content = content[file.write(content) :]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that after a crash at any moment it has its old content or the new one, never a part. A link
    in its place is replaced, and its target stays unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with the checksum of its content."""
    write_atomically(path, json.dumps({**content, "crc32": _checksum(content)}, indent=2) + "\n")


def read_checked(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read what `write_checked` wrote, with these keys; old files may lack the checksum.

    Raises:
        ValueError: the content is something else.
    """
    content = parse_json(read_whole(path))
    if not isinstance(content, dict):
        raise ValueError(f"it holds no {', '.join(keys)}")
    checksum = content.pop("crc32", None)
    if content.keys() != set(keys):
        raise ValueError(f"it holds {', '.join(content) or 'nothing'} instead of {', '.join(keys)}")
    if checksum not in (None, _checksum(content)):
        raise ValueError("its checksum does not match its content")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
