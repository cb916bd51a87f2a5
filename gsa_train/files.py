"""Small files that are whole whatever happens."""

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
"""What file systems say that have no POSIX locks."""


def read_named(option: str, path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file that the user names by an option, without a byte order mark.

    Raises:
        ValueError: there is none, it is no text, no regular file, or too large; says the option and the remedy.
    """
    try:
        return read_whole(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: no UTF-8 text ({error}); give a text file") from error
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    except OSError as error:
        raise ValueError(
            f"{option} {path}: cannot be read ({error.strerror}); give a file that is there"
        ) from error


def own_file(path: str, flags: int) -> int:
    """`opener` of `open` for a file that a run keeps: a plain file of its own, never what a link leads to, which may be
    any file of the user's, nor a pipe, which would wait for a reader. Folders on the way may be links.

    Raises:
        OSError: it is a link, or no plain file.
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
    """Without a buffer, also to be read; a last line that a kill or a full disk has cut off is ended. What has another
    name, too (a hard link, as in a copy by `cp -l`), becomes a file of its own: the other name keeps its content.

    Raises:
        OSError: see `own_file`; or it cannot be written.
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
        while content:  # on an almost full disk a write takes a part, and the next one fails
            content = content[file.write(content) :]


def write_atomically(path: Path, content: str | bytes) -> None:
    """After a crash at any moment the file has its old content or the new one, never a part of it. A link in its place
    is replaced, and what it leads to stays as it is."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """JSON with the checksum of its content."""
    write_atomically(path, json.dumps({**content, "crc32": _checksum(content)}, indent=2) + "\n")


def read_checked(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """What `write_checked` wrote, with these keys; also one from before there were checksums.

    Raises:
        ValueError: it is something else.
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
