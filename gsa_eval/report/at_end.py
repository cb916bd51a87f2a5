"""Draw plots and report of a complete run, in a process that the run starts at its end:

    python -m gsa_eval.report.at_end RUN_DIR

The separate process keeps the trainer independent of drawing and its errors. It prints a line for each file, or the
reason why a file is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

FAULTS_OF_DRAWING = (
    OSError,
    ImportError,  # the checkout may be newer than the installed packages
    MemoryError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
)
"""Errors from damaged records, other package versions or a full disk, which must not fail a complete run."""


def draw_at_end(folder: Path) -> list[str]:
    return [*_lines("plots", folder, _plots), *_lines("report", folder, _report)]


def _lines(what: str, folder: Path, write: Callable[[Path], list[Path]]) -> list[str]:
    try:
        return [f"wrote {path}" for path in write(folder)]
    except FAULTS_OF_DRAWING as error:
        why = error if isinstance(error, OSError | ImportError) else repr(error)
        return [f"the run is complete, and its {what} cannot be drawn: {why}; gsa-plot {folder} tries again"]


def _plots(folder: Path) -> list[Path]:
    from gsa_eval.report.plots import write_plots

    return write_plots(folder)


def _report(folder: Path) -> list[Path]:
    from gsa_eval.report.page import write_report

    return [write_report([folder], folder / "report.html")]


if __name__ == "__main__":
    print("\n".join(draw_at_end(Path(sys.argv[1]))))
