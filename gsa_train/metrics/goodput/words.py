"""Format the account of a run's time as a line for the console and rows for tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gsa_train.metrics.goodput.account import START_UP, Account, Line
from gsa_train.metrics.progress import duration

NAMES = {
    "import": "import",
    "process_groups": "process groups",
    "health": "health of devices",
    "checkpoint": "reading checkpoints",
    "readers": "opening the text",
    "model": "model and optimizer",
    "folder": "run folder, W&B",
    "first_step": "first steps (compilation)",
    "repeated": "steps done again",
    "save": "stalls of saves",
    "copies": "waiting for their copies",
    "validation": "validation",
    "tasks": "tasks",
    "text": "waiting for text",
    "stragglers": "waiting for slow ranks",
    "detection": "faults until exit",
    "down": "down",
    "other": "other",
}
"""Maps each category of lost time to its name in texts."""
MOST_NAMED = 4
"""Largest number of losses, or ranks, named in a console line."""


def in_one_line(account: Account) -> str:
    """Returns a line with the time lost so far and its largest categories."""
    lost = sum(account.lost_seconds.values())
    largest = sorted(account.lost_seconds.items(), key=lambda each: -each[1])[:MOST_NAMED]
    named = ", ".join(f"{NAMES[name]} {short(seconds)}" for name, seconds in largest if seconds >= 0.05)
    return (
        f"goodput: this run has lost {short(lost)} of {short(account.wall_seconds)} so far "
        f"(ETTR {account.ettr:.1%}){f': {named}' if named else ''}"
    )


def lost_in_words(line: Line, silent: Sequence[str]) -> str:
    """Returns a line about a start that wrote no end.

    Args:
        silent: ranks without last words in the previous start by the same torchrun.
    """
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
    named = f"; without last words, as if killed: {', '.join(silent[:MOST_NAMED])}" if silent else ""
    more = f" and {len(silent) - MOST_NAMED} more" if silent[MOST_NAMED:] else ""
    return (
        f"the previous start did not end by itself: after step {line['step']}, last sign of life at {at}"
        f"{named}{more}"
    )


def start_up_in_words(seconds: Mapping[str, float]) -> str:
    """Returns a line about the time from a process's start to the end of its first step, by part.

    Args:
        seconds: by activity of this process.
    """
    parts = {name: seconds.get(name, 0.0) for name in START_UP}
    named = ", ".join(f"{NAMES[name]} {short(value)}" for name, value in parts.items())
    first = short(seconds.get("first_step", 0.0))
    return f"start-up {short(sum(parts.values()))}: {named}; then the first step {first}"


def short(seconds: float) -> str:
    """Format as 1.4s, 45s, 2m31s, 3h05m."""
    return f"{seconds:.1f}s" if abs(seconds) < 9.95 else duration(seconds)


def about_run(name: str, account: Account) -> str:
    """Returns lines with the account of a run. Losses of zero are left out."""
    wall = account.wall_seconds or 1.0
    parts = {"productive": account.productive_seconds}
    parts |= {NAMES[name]: value for name, value in account.lost_seconds.items() if abs(value) >= 0.05}
    shares = [(name, short(seconds), f"{seconds / wall:.2%}") for name, seconds in parts.items()]
    starts = [
        {
            "start": str(number),
            "after step": f"{start.step:,}",
            "down before": short(start.down_seconds),
            "start-up": short(start.start_up_seconds),
            "ended": start.ended or "runs",
            "at step": f"{start.last_step:,}",
            "fault until exit": short(start.detection_seconds),
            "steps done again": str(start.repeated_steps),
        }
        for number, start in enumerate(account.starts, start=1)
    ]
    lines = [
        f"{name}: ETTR {account.ettr:.2%} over {short(account.wall_seconds)} and {len(account.starts)} starts",
        *table([("", "time", "share"), *shares]),
        "",
        *table([tuple(starts[0]), *(tuple(each.values()) for each in starts)]),
    ]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    return [form.format(*row).rstrip() for row in rows]
