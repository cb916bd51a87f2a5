"""Write a study's report from the run folders: the tables as Markdown and CSV."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from gsa_study.caveats import close_lines, notes
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
    run_rows,
    seed_rows,
    value_rows,
    values_csv,
)
from gsa_train.files import write_atomically


def write_study_report(results: Results, folder: Path) -> list[Path]:
    """Write tables.md, arms.csv and values.csv into the folder, and return the files."""
    files = {
        "tables.md": markdown(results, folder),
        "arms.csv": arms_csv(results),
        "values.csv": values_csv(results),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def markdown(results: Results, folder: Path) -> str:
    """Return all tables, with links to the run folders relative to `folder`."""
    parts = [f"# {results.study.title}"]
    for title, rows, said in (
        ("Arms", narrow(arm_rows(results)), [SPREAD, *close_lines(results), *notes(results)]),
        ("Seed by seed", seed_rows(results), [SEEDS]),
        ("Each run", value_rows(results), []),
        ("Runs", _linked_runs(results, folder), []),
    ):
        if rows:
            parts += [f"## {title}", markdown_table(rows), bullets(said)]
    parts.append(f"Made by `launch/study.py --study {results.study.path} --report` from these folders.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _linked_runs(results: Results, folder: Path) -> Rows:
    head, *rows = run_rows(results, folder)
    for each, row in zip(results.runs, rows, strict=True):
        for place, name in ((head.index("folder"), "."), (head.index("config"), "config.yaml")):
            path, is_there = row[place], (each.folder / name).exists()
            if path != "–":
                row[place] = f"[{head[place]}]({quote(path)})" if is_there else f"`{path}`"
    return [head, *rows]
