"""goodput.jsonl and alive.json of a run folder, as they were left: by a run under way, complete or killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gsa_train.goodput.account import Account, Accounting, Line
from gsa_train.metrics.record_format import read_records

FILE = "goodput.jsonl"
"""Lines of gsa_train.goodput.account. Nothing is ever taken out of it."""
ALIVE = "alive.json"
"""What the newest process would say in a `lost` line, written again every few seconds."""
ALIVE_BYTES = 1024
"""Its size, with spaces at the end: written at once in its place, it is whole after any kill."""


def read_lines(folder: Path) -> list[Line]:
    """Of the run so far; empty for one of a version that wrote none."""
    path = folder / FILE
    return [each for each in read_records(path) if "seconds" in each] if path.exists() else []


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
    if alive and alive["began"] == began and alive["progress"] >= newest["time"]:
        line |= {key: alive[key] for key in ("time", "progress", "step", "seconds")}
    reports = [path.stat().st_mtime for path in (folder / "faults").glob("*/report.txt")]
    return [{**line, "time": max([line["time"], *(at for at in reports if at >= began)])}]


def alive_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode().ljust(ALIVE_BYTES - 1) + b"\n"


def _read_alive(path: Path) -> dict[str, Any]:
    """Empty where there is none, or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    keys = {"began", "time", "progress", "step", "seconds"}
    return content if isinstance(content, dict) and content.keys() == keys else {}


def read_account(folder: Path) -> Account | None:
    """Where the time of a run went; None for a run of a version that did not note it."""
    lines = read_lines(folder)
    return Accounting([*lines, *lost_line(folder, lines)]).account() if lines else None
