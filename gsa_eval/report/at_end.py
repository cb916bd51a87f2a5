"""Write the report of a complete run, in a process that the run starts at its end:

    python -m gsa_eval.report.at_end RUN_DIR

The separate process keeps the trainer independent of drawing and its errors. It prints the path of the
report, or the reason why it is missing.
"""

from __future__ import annotations

import sys
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


def draw_at_end(folder: Path) -> str:
    try:
        from gsa_eval.report.page import write_report

        return f"wrote {write_report([folder], folder / 'report.html')}"
    except FAULTS_OF_DRAWING as error:
        why = error if isinstance(error, OSError | ImportError) else repr(error)
        return f"the run is complete, and its report cannot be drawn: {why}; gsa-plot {folder} tries again"


if __name__ == "__main__":
    print(draw_at_end(Path(sys.argv[1])))
