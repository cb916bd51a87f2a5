"""A study's report: one HTML page and the tables as Markdown and CSV, made of the run folders alone."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from gsa_eval.report.page import chart_html, document
from gsa_study.charts import study_charts
from gsa_study.notes import close_lines, notes
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
    seed_by_seed,
    seed_rows,
    value_rows,
    values_csv,
)
from gsa_train.files import write_atomically


def write_study_report(results: Results, folder: Path) -> list[Path]:
    """Write index.html, tables.md, arms.csv and values.csv into the folder; returns the files."""
    return _write(
        folder,
        {"index.html": _page(results, folder), "tables.md": markdown(results, folder), **_csvs(results)},
    )


def write_tables(results: Results, folder: Path) -> list[Path]:
    """Write tables.md, arms.csv and values.csv for a place where the run folders will not be, as for documentation."""
    return _write(folder, {"tables.md": markdown(results), **_csvs(results)})


def markdown(results: Results, folder: Path | None = None) -> str:
    """All tables.

    Args:
        folder: run folders are linked as seen from this one; None: they are named, as where they will not be.
    """
    head, *rows = run_rows(results, folder)
    for row in rows:
        for place in (head.index("folder"), head.index("config")):
            path = row[place]
            row[place] = path if path == "–" else f"[{head[place]}]({path})" if folder else f"`{path}`"
    parts = [f"# {results.study.title}", markdown_table(narrow(arm_rows(results))), SPREAD]
    parts += [*seed_by_seed(results), bullets(close_lines(results)), bullets(notes(results))]
    parts += ["## Each run", markdown_table(value_rows(results)), "## Runs", markdown_table([head, *rows])]
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
    charts = "".join(map(chart_html, study_charts(results)))
    config = html.escape(results.study.path.read_text(encoding="utf-8"))
    body = f"""
<nav><a href="#arms">Arms</a><a href="#charts">Charts</a><a href="#values">Each run</a><a href="#runs">Runs</a>
<a href="#study">Study file</a></nav>
<h2 id="arms">Arms</h2>{_table(narrow(_with_links_to_runs(results)))}
<p class=soft>{SPREAD} The small numbers are the seeds: each leads to its run.</p>
{_seed_by_seed(results)}{_list(close_lines(results))}{_list(notes(results))}
<h2 id="charts">Charts</h2><div class="plots">{charts}</div>
<h2 id="values">Each run</h2>{_table(_linked_names(value_rows(results)))}
<h2 id="runs">Runs</h2>{_table(_runs(results, folder))}
<p class=soft>Tables as files: <a href="tables.md">Markdown</a>, <a href="arms.csv">arms.csv</a>,
<a href="values.csv">values.csv</a>.</p>
<h2 id="study">Study file</h2><p>{html.escape(str(results.study.path))}</p><pre>{config}</pre>"""
    return document(results.study.title, body)


def _with_links_to_runs(results: Results) -> Rows:
    head, *rows = arm_rows(results)
    linked = []
    for arm, row in zip(results.arms, rows, strict=True):
        plain, means = row[: -len(results.columns) or None], row[len(row) - len(results.columns) :]
        cells = [html.escape(cell) for cell in plain]
        for column, mean in zip(results.columns, means, strict=True):
            runs = [run for run in results.runs_of(arm) if column.values.get(run.name) is not None]
            seeds = " ".join(f'<a href="#run-{run.name}">{run.seed}</a>' for run in runs)
            cells.append(f"{html.escape(mean)} <sup>{seeds}</sup>" if runs else html.escape(mean))
        linked.append(cells)
    return [[html.escape(cell) for cell in head], *linked]


def _seed_by_seed(results: Results) -> str:
    rows = [[html.escape(cell) for cell in row] for row in seed_rows(results)]
    return f"{_table(rows)}<p class=soft>{SEEDS}</p>" if rows else ""


def _linked_names(rows: Rows) -> Rows:
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    return [head, *([f'<a href="#run-{row[0]}">{row[0]}</a>', *row[1:]] for row in body)]


def _runs(results: Results, folder: Path) -> Rows:
    """With links to each run's folder, config and own report."""
    head, *rows = run_rows(results)
    linked = []
    for each, row in zip(results.runs, rows, strict=True):
        cells = [html.escape(cell) for cell in row]
        cells[0] = f'<span id="run-{each.run.name}">{cells[0]}</span>'
        for place, name in ((head.index("folder"), "."), (head.index("config"), "config.yaml")):
            if (target := each.folder / name).exists():
                cells[place] = f'<a href="{quote(relative(target, folder))}">{cells[place]}</a>'
        report = each.folder / "report.html"
        here = quote(relative(report, folder))
        cells.append(f'<a href="{here}">report</a>' if report.exists() else "")
        linked.append(cells)
    return [[*head, ""], *linked]


def _table(rows: Rows) -> str:
    """Of cells that are HTML; all but the first column are numbers to the right."""
    head, *body = rows
    top = "".join(f"<th{' class=number' * (place > 0)}>{cell}</th>" for place, cell in enumerate(head))
    lines = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' * (place > 0)}>{cell}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in body
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{lines}</table></div>'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
