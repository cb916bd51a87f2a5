"""Read a whole user-supplied file, but refuse pipes, devices and large files. For JSON, also limit the depth of nested
lists and objects."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28
"""The default size limit, which is ten times the largest known tokenizer.json"""
MOST_LEVELS = 64
"""The limit of nested lists and objects. Python's parsers end in a RecursionError at a thousand."""
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
"""The files of a transformers model that hold an object"""


def check_kind(path: str | Path, remedy: str = "give a regular file") -> None:
    """Refuse pipes and devices, because reading them may never end. A missing path is not refused here.

    Raises:
        ValueError: the path is neither a file nor a folder
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path}: is {_kind(mode)}, no regular file; {remedy}")


def read_whole(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a local file.

    Raises:
        ValueError: the file is not regular, or larger than `most_bytes`
        OSError: the file cannot be read
    """
    # Open without waiting for a pipe's writer, then check the kind of the opened file.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: is {_kind(status.st_mode)}, no regular file; give a regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(
            f"{path}: has {status.st_size} bytes, more than the {most_bytes} that such a file may have; "
            "give a smaller file"
        )
    return content


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if the content is not JSON, or nested too deeply."""
    try:
        tree = json.loads(content)
        too_deep = is_too_deep(tree)
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"lists and objects are nested more than {MOST_LEVELS} levels deep")
    return tree


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model's folder.

    Raises:
        ValueError: the file is missing, is not JSON, or holds no object. The error names the file and the remedy.
    """
    try:
        content = parse_json(read_whole(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the folder of a model") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it from its source again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no fields; copy it from its source again")
    return content


def is_too_deep(tree: Any) -> bool:
    """Returns whether more than `MOST_LEVELS` lists and dictionaries are nested."""
    level = [tree]
    for _ in range(MOST_LEVELS + 1):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for test, name in kinds.items() if test(mode)), "of another kind")
