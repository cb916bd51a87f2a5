"""Read goodput.jsonl and alive.json of a run folder. The run may be in progress, complete or killed."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from gsa_train.metrics.goodput.account import Account, Accounting, Line
from gsa_train.metrics.record_checks import is_number, is_step, is_time
from gsa_train.metrics.record_format import read_records

logger = logging.getLogger(__name__)

FILE = "goodput.jsonl"
"""Lines of gsa_train.metrics.goodput.account. Lines are never removed."""
ALIVE = "alive.json"
"""File with the content for a `lost` line of the newest process, rewritten every few seconds."""
NEEDED: dict[str, tuple[str, ...]] = {
    "start": ("began",),
    "steps": (),
    "end": (),
    "lost": ("progress",),
}
"""Maps each kind of line to the timestamps (Unix seconds) that the line has in addition to `time` and `step`."""
ALIVE_BYTES = 1024
"""Size of alive.json, padded with spaces. A single write replaces the content, so that the file stays intact after a
kill."""


def read_lines(folder: Path) -> list[Line]:
    """Read the lines of the run so far.

    Damaged lines are skipped, with a warning. Each line has the seconds since its process began, so the process's next
    line covers a skipped line's time.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    return [*read_records(path, lambda line: "" if is_whole(line) else "is not what lines of its kind are")]


def is_whole(line: Line) -> bool:
    """Returns True if the line has the keys of its kind."""
    kind, seconds = line.get("kind", ""), line.get("seconds")
    needed = NEEDED.get(kind) if isinstance(kind, str) else None
    return (
        needed is not None
        and all(is_time(line.get(name)) for name in ("time", *needed))
        and isinstance(seconds, dict)
        and all(is_number(each) and math.isfinite(each) for each in seconds.values())
        and isinstance(line.get("reason", ""), str)
        and isinstance(line.get("phase", ""), str)
    )


def lost_line(folder: Path, lines: list[Line]) -> list[Line]:
    """Returns the `lost` line of the newest process if it has no `end` or `lost` line yet, else an empty list.

    The `time` of the new line is the latest of three times: the time of the process's last line, the time in
    alive.json, and the time at which another rank reported a hang.
    """
    starts = [each for each in lines if each["kind"] == "start"]
    if not starts or lines[-1]["kind"] in ("end", "lost"):
        return []
    newest, began = lines[-1], starts[-1]["began"]
    line = {**newest, "kind": "lost", "progress": newest["time"]}
    alive = _read_alive(folder / ALIVE)
    if alive and alive["began"] == began:
        line["time"] = max(newest["time"], alive["time"])
        if alive["progress"] >= newest["time"]:
            line |= {key: alive[key] for key in ("progress", "step", "seconds")}
    reports = [path.stat().st_mtime for path in (folder / "faults").glob("*/report.txt")]
    known = (at for at in reports if began <= at <= time.time())  # later: a user set the clock back
    return [{**line, "time": max([line["time"], *known])}]


def alive_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode().ljust(ALIVE_BYTES - 1) + b"\n"


def _read_alive(path: Path) -> dict[str, Any]:
    """Read alive.json. Returns {} if the file is missing, empty or damaged. An empty file causes no warning: a kill
    before the first write leaves one."""
    if not path.is_file():
        return {}
    try:
        text = path.read_bytes()
        content = json.loads(text) if text else {}
    except (OSError, ValueError, RecursionError) as error:
        content = error
    if isinstance(content, dict) and (not content or _is_sign_of_life(content)):
        return content
    logger.warning("%s is damaged; using the newest line of %s as the last sign of life", path, FILE)
    return {}


def _is_sign_of_life(content: dict[str, Any]) -> bool:
    if content.keys() != {"began", "time", "progress", "step", "seconds"}:
        return False
    return is_step(content["step"]) and is_time(content["began"]) and is_whole({**content, "kind": "lost"})


def read_account(folder: Path) -> Account | None:
    """Returns the account of a run's time, or None for a version that did not record it."""
    lines = read_lines(folder)
    return Accounting([*lines, *lost_line(folder, lines)]).account() if lines else None
