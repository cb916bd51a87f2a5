"""Write a study's report from the run folders: one HTML page, and the tables as Markdown and CSV."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from gsa_eval.report.page import chart_html, document
from gsa_study.caveats import close_lines, notes
from gsa_study.charts import study_charts
from gsa_study.tables import (
    SEEDS,
    SPREAD,
    Results,
    Rows,
    arm_rows,
    arms_csv,
    bullets,
    markdown_table,
    narrow,
    relative,
    run_rows,
    seed_rows,
    value_rows,
    values_csv,
)
from gsa_train.files import write_atomically

LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
"""Matches a Markdown link in a table cell."""


def write_study_report(results: Results, folder: Path) -> list[Path]:
    """Write index.html, tables.md, arms.csv and values.csv into the folder, and return the files."""
    files = {"index.html": _page(results, folder), "tables.md": markdown(results, folder)}
    return _write(folder, {**files, **_csvs(results)})


def write_tables(results: Results, folder: Path) -> list[Path]:
    """Write tables.md, arms.csv and values.csv for a place without the run folders, such as documentation."""
    return _write(folder, {"tables.md": markdown(results), **_csvs(results)})


def tables(results: Results, folder: Path | None) -> dict[str, tuple[Rows, list[str]]]:
    """Return a dict title -> the table, and the lines below it.

    Args:
        folder: run folders are linked relative to this folder; None: they are only named.
    """
    head, *rows = run_rows(results, folder)
    if folder:
        head.append("report")
    for each, row in zip(results.runs, rows, strict=True):
        for place, name in ((head.index("folder"), "."), (head.index("config"), "config.yaml")):
            path, is_there = row[place], (each.folder / name).exists()
            if path != "–":
                row[place] = f"[{head[place]}]({quote(path)})" if folder and is_there else f"`{path}`"
        if folder:
            report = each.folder / "report.html"
            row.append(f"[report]({quote(relative(report, folder))})" if report.exists() else "")
    found = {
        "Arms": (narrow(arm_rows(results)), [SPREAD, *close_lines(results), *notes(results)]),
        "Seed by seed": (seed_rows(results), [SEEDS]),
        "Each run": (value_rows(results), []),
        "Runs": ([head, *rows], []),
    }
    return {title: table for title, table in found.items() if table[0]}


def markdown(results: Results, folder: Path | None = None) -> str:
    """Return all tables, with the run folders as in `tables`."""
    parts = [f"# {results.study.title}"]
    for title, (rows, said) in tables(results, folder).items():
        parts += [f"## {title}", markdown_table(rows), bullets(said)]
    parts.append(f"Made by `launch/study.py --study {results.study.path} --report` from these folders.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _csvs(results: Results) -> dict[str, str]:
    return {"arms.csv": arms_csv(results), "values.csv": values_csv(results)}


def _write(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _page(results: Results, folder: Path) -> str:
    parts = []
    for title, (rows, said) in tables(results, folder).items():
        parts.append(f"<h2>{title}</h2>{_table(rows)}")
        parts.append("".join(f"<p class=soft>{html.escape(line)}</p>" for line in said))
    charts = "".join(map(chart_html, study_charts(results)))
    config = html.escape(results.study.path.read_text(encoding="utf-8"))
    body = f"""{"".join(parts)}
<h2>Charts</h2><div class="plots">{charts}</div>
<p class=soft>Tables as files: <a href="tables.md">Markdown</a>, <a href="arms.csv">arms.csv</a>,
<a href="values.csv">values.csv</a>.</p>
<h2>Study file</h2><p>{html.escape(str(results.study.path))}</p><pre>{config}</pre>"""
    return document(results.study.title, body)


def _table(rows: Rows) -> str:
    head, *body = rows
    lines = [_line("th", head), *(_line("td", row) for row in body)]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _line(tag: str, row: list[str]) -> str:
    cells = (LINK.sub(r'<a href="\2">\1</a>', html.escape(cell).replace("`", "")) for cell in row)
    cells = (f"<{tag}{' class=number' * (place > 0)}>{cell}</{tag}>" for place, cell in enumerate(cells))
    return f"<tr>{''.join(cells)}</tr>"
