"""Small files that are whole whatever happens."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Collection
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


def write_atomically(path: Path, text: str) -> None:
    """After a crash at any moment the file has its old content or the new one, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
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
        raise ValueError("its checksum is not that of its content")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
