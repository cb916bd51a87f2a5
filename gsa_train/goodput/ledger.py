"""goodput.jsonl and alive.json of a run folder, as they were left: by a run under way, complete or killed."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_train.goodput.account import Account, Accounting, Line
from gsa_train.metrics.record_format import read_records

logger = logging.getLogger(__name__)

FILE = "goodput.jsonl"
"""Lines of gsa_train.goodput.account. Nothing is ever taken out of it."""
ALIVE = "alive.json"
"""What the newest process would say in a `lost` line, written again every few seconds."""
NEEDED: dict[str, tuple[str, ...]] = {
    "start": ("began",),
    "steps": (),
    "rewind": (),
    "end": (),
    "lost": ("progress",),
}
"""Kind of a line -> numbers that it has beside `time` and `step`."""
ALIVE_BYTES = 1024
"""Its size, with spaces at the end: written at once in its place, it is whole after any kill."""


def read_lines(folder: Path) -> list[Line]:
    """Of the run so far; empty for one of a version that wrote none. A warning names damaged lines, which are left
    out: later ones hold what they said."""
    path = folder / FILE
    if not path.exists():
        return []
    found = read_records(path)
    whole: list[Line] = [each for each in found if is_whole(each)]
    if len(whole) < len(found):
        logger.warning("%s: %d of %d lines are damaged; left out", path, len(found) - len(whole), len(found))
    return whole


def is_whole(line: Line) -> bool:
    """It has what lines of its kind have."""
    needed = {"time", *NEEDED.get(line.get("kind", ""), ("kind",))}
    seconds = line.get("seconds")
    return (
        all(_is_number(line.get(name)) for name in needed)
        and isinstance(seconds, dict)
        and all(map(_is_number, seconds.values()))
        and isinstance(line.get("reason", ""), str)
        and isinstance(line.get("phase", ""), str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def lost_line(folder: Path, lines: list[Line]) -> list[Line]:
    """What is known of the end of the newest process; empty where it has said `end` itself, or there is none.

    Its last sign of life is the newest of its last line, its alive.json, and a report of a hang by another rank.
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
    return [{**line, "time": max([line["time"], *(at for at in reports if at >= began)])}]


def alive_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode().ljust(ALIVE_BYTES - 1) + b"\n"


def _read_alive(path: Path) -> dict[str, Any]:
    """Empty where there is none, or it is damaged."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    keys = {"began", "time", "progress", "step", "seconds"}
    if not isinstance(content, dict) or content.keys() != keys or not isinstance(content["step"], int):
        return {}
    return content if is_whole({**content, "kind": "lost"}) and _is_number(content["began"]) else {}


def read_account(folder: Path) -> Account | None:
    """Where the time of a run went; None for a run of a version that did not note it."""
    lines = read_lines(folder)
    return Accounting([*lines, *lost_line(folder, lines)]).account() if lines else None
