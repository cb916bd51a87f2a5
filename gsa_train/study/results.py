"""Pages of results for the documentation: a study's numbers with the paper's beside them, and what people say of both.

Numbers come from the run folders alone. What a person writes is in `verdicts/<study>.md` of the same folder
(`study/verdicts.py`): its first line stands in the table of all studies. `verdicts/recommendation.md` opens that
table's page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gsa_train.files import write_atomically
from gsa_train.study.headline import FIGURE
from gsa_train.study.states import read_failures
from gsa_train.study.study_file import Study
from gsa_train.study.tables import (
    SPREAD,
    Results,
    Rows,
    arm_rows,
    bullets,
    close_lines,
    markdown_table,
    notes,
    read_results,
    run_rows,
    seed_by_seed,
    value_rows,
    values_csv,
)
from gsa_train.study.verdicts import read_verdict

RECOMMENDATION = "recommendation"
NOT_RUN = "not run yet"
FINISHED = re.compile(r"^(\d+) of (\d+) runs are finished\.$", re.MULTILINE)


@dataclass(frozen=True)
class Standing:
    """A row of the table of all pages."""

    page: str
    title: str
    runs: str
    said: str


def write_values(study: Study, out: Path) -> tuple[Results, list[Path]]:
    """Reads a study's runs, and writes the CSV of their values and the figure of their losses, ahead of all pages:
    verdicts take numbers of any study. Returns the files that were written: none where the page stays as it is."""
    results = read_results(study, read_failures(study.folder))
    finished = _finished(results)
    if not finished or finished < _finished_on(_page(study, out)):
        return results, []
    out.mkdir(parents=True, exist_ok=True)
    table = out / f"{study.config.name}.csv"
    write_atomically(table, values_csv(results))
    # Here: matplotlib takes half a second, and is there for reports alone.
    from gsa_train.study.figure import write_study_figure

    return results, [table, write_study_figure(results, table.with_suffix(".png"))]


def write_page(results: Results, out: Path) -> tuple[Standing, list[Path]]:
    """A study's page; returns the files that were written.

    A page stays as it is that was made of more finished runs than are here: of a study whose folder is elsewhere, or
    was not unpacked.

    Raises:
        ConfigError: the verdict names a number that is not there.
    """
    study, written = results.study, []
    page, verdict = _page(study, out), read_verdict(out, study.config.name)
    if _finished(results) >= _finished_on(page):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(page, page_text(results, verdict))
        written.append(page)
    found = FINISHED.search(page.read_text(encoding="utf-8"))
    done, of_all = found.groups() if found else ("0", str(len(study.runs)))
    said = verdict.splitlines()[0] if verdict else "no verdict yet"
    standing = Standing(page.name, study.title, f"{done} of {of_all}", said if done != "0" else NOT_RUN)
    return standing, written


def _page(study: Study, out: Path) -> Path:
    return out / f"{study.config.name}.md"


def _finished(results: Results) -> int:
    return sum(each.complete for each in results.values)


def _finished_on(page: Path) -> int:
    """Runs of which a page was made."""
    found = FINISHED.search(page.read_text(encoding="utf-8")) if page.is_file() else None
    return int(found.group(1)) if found else 0


def page_text(results: Results, verdict: str) -> str:
    """Without numbers where no run is finished."""
    study, finished = results.study, _finished(results)
    parts = [f"# {study.title}", study.config.question.strip()]
    parts.append(f"{finished} of {len(results.values)} runs are finished.")
    if not finished:
        parts.append(f"{NOT_RUN.capitalize()}: `python launch/study.py --study {study.path}`.")
        return "\n\n".join(parts) + "\n"
    figure = f"![The first metric of each arm, and losses by tokens]({study.config.name}.png)"
    parts += [verdict, figure, "## Arms", markdown_table(with_paper(results)), SPREAD]
    parts += [*seed_by_seed(results), bullets(close_lines(results)), bullets(notes(results))]
    parts += folded("Numbers of each run", value_rows(results))
    parts += folded("Folder, config and commit of each run", run_rows(results))
    parts.append(
        f"In full in [{study.config.name}.csv]({study.config.name}.csv). Study file: `{study.path}`. Made by "
        "`python launch/results.py` from these folders: do not edit."
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def folded(summary: str, rows: Rows) -> list[str]:
    """A table that a reader opens: the page is of the arms."""
    return [f"<details><summary>{summary}</summary>", markdown_table(rows), "</details>"]


def with_paper(results: Results) -> Rows:
    """The table of the arms, and behind a column of which the paper says something what it says."""
    head, *rows = arm_rows(results)
    first = len(head) - len(results.columns)
    places = [first + number for number, column in enumerate(results.columns) if column.paper]
    for place in reversed(places):
        column = results.columns[place - first]
        head.insert(place + 1, f"{column.title}: the paper")
        for arm, row in zip(results.arms, rows, strict=True):
            row.insert(place + 1, column.paper.get(arm, ""))
    return [head, *rows]


def write_overview(standings: Sequence[Standing], out: Path) -> Path:
    """README.md: the recommendation and the headline figure, if they are there, and what each page says."""
    path, recommendation = out / "README.md", read_verdict(out, RECOMMENDATION)
    rows = [["study", "runs", "what it says"]]
    rows += [[f"[{each.title}]({each.page})", each.runs, each.said] for each in standings]
    figure = f"![Losses by tokens and by training time]({FIGURE})" if (out / FIGURE).is_file() else ""
    parts = ["# Results", recommendation, figure, markdown_table(rows)]
    parts.append(
        "Made by `python launch/results.py`: do not edit. [studies.md](../how_to/studies.md) says how studies are run."
    )
    write_atomically(path, "\n\n".join(filter(None, parts)) + "\n")
    return path
