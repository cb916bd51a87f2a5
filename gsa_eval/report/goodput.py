"""Render two tables for the report: a run's lost time by category, and the run's starts with the fault that ended
each.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from gsa_eval.report.run_files import RunFiles
from gsa_train.metrics.goodput.words import STARTS_HEAD, rows_of_losses, rows_of_starts


def goodput_in_html(run: RunFiles) -> str:
    """Returns the tables, or "" for a run of a version that did not record its time."""
    if run.goodput is None:
        return ""
    losses = _table(("wall time", "time", "share"), rows_of_losses(run.goodput))
    starts = _table(STARTS_HEAD, rows_of_starts(run.goodput))
    title = f"where the time went: ETTR {run.goodput.ettr:.1%}"
    return f"<details><summary>{title}</summary>{losses}{starts}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"]
    for name, *numbers in rows:
        cells = "".join(f"<td class=number>{html.escape(cell)}</td>" for cell in numbers)
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
