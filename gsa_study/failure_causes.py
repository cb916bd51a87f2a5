"""Extract the reason of a job's failure from its output, in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_LETTERS = 300
TRACEBACK = "Traceback (most recent call last):"
LAUNCHERS_OWN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
"""torchrun's own error after a rank has failed. The rank's error comes before it."""
WARNING = re.compile(
    r"^(\[rank\d+\]:)?\s*\[?W\d{4} "  # torch's `W1126 09:00:00 ...`: a process group that was not destroyed
    r"|:\d+: \w*Warning: |^\s*warnings\.warn\("  # Python's, and the line of code below
)


def reason_in(printed: str, crashed: bool) -> str:
    """If the output has a Python traceback, return the error of the last one. Otherwise return the last line that has
    text and is not a warning, or "" if there is none.

    Args:
        crashed: whether an uncaught error may have ended the job. If not, tracebacks are ignored, because the
            job survived their errors.
    """
    lines = printed.splitlines()
    said = (line for line in reversed(lines) if any(map(str.isalnum, line)) and not WARNING.search(line))
    found = (_last_error(lines) if crashed else "") or next(said, "")
    return " ".join(found.split())[:MOST_LETTERS]


def _last_error(lines: Sequence[str]) -> str:
    for number in reversed(range(len(lines))):
        if TRACEBACK in lines[number]:
            error = _error_below(lines, number)
            if error and not error.startswith(LAUNCHERS_OWN):
                return error
    return ""


def _error_below(lines: Sequence[str], number: int) -> str:
    """Return the first unindented line after the traceback's frames. torch may start each line with the rank
    (`[rank0]: `), and mix in lines of other ranks. Lines without the traceback's prefix are therefore skipped."""
    prefix = lines[number].split(TRACEBACK)[0]
    for line in lines[number + 1 :]:
        rest = line.removeprefix(prefix)
        if line.startswith(prefix) and rest.strip() and not rest[0].isspace() and not WARNING.search(rest):
            return rest
    return ""
