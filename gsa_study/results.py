"""Pages of results for the documentation: a study's numbers with the paper's beside them, and what people say of both.

Numbers come from the record of the study alone (`gsa_study/record.py`). What a person writes is in
`verdicts/<study>.md` of the same folder (`gsa_study/verdicts.py`): its first line stands in the table of all studies.
`verdicts/recommendation.md` opens that table's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from gsa_study.headline import FIGURE
from gsa_study.notes import close_lines, notes
from gsa_study.record import files_of
from gsa_study.tables import (
    SPREAD,
    Results,
    Rows,
    arm_rows,
    bullets,
    markdown_table,
    narrow,
    run_rows,
    seed_by_seed,
    value_rows,
)
from gsa_study.verdicts import read_verdict
from gsa_train.files import write_atomically

RECOMMENDATION = "recommendation"
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Standing:
    """A row of the table of all pages."""

    page: str
    title: str
    runs: str
    said: str


def write_figure(results: Results, out: Path) -> Path | None:
    """A study's figure; None where it stays as it is, since no run's losses are recorded."""
    path = out / f"{results.study.config.name}.png"
    if path.is_file() and not any(each.losses for each in results.finished):
        return None
    # Here: matplotlib takes half a second, and is there for reports alone.
    from gsa_study.figure import write_study_figure

    return write_study_figure(results, path)


def write_page(results: Results, out: Path) -> tuple[Standing, Path]:
    """A study's page.

    Raises:
        ConfigError: the verdict names a number that is not there.
    """
    study, finished = results.study, len(results.finished)
    page, verdict = out / f"{study.config.name}.md", read_verdict(out, study.config.name)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(page, page_text(results, verdict))
    said = verdict.splitlines()[0] if verdict else "no verdict yet"
    runs = f"{finished} of {len(results.runs)}"
    return Standing(page.name, study.title, runs, said if finished else NOT_RUN), page


def page_text(results: Results, verdict: str) -> str:
    """Without numbers where no run is finished."""
    study, finished = results.study, len(results.finished)
    parts = [f"# {study.title}", study.config.question.strip()]
    parts.append(f"{finished} of {len(results.runs)} runs are finished.")
    if not finished:
        parts.append(f"{NOT_RUN.capitalize()}: `python launch/study.py --study {study.path}`.")
        return "\n\n".join(parts) + "\n"
    figure = f"![The first metric of each arm, and losses by tokens]({study.config.name}.png)"
    parts += [verdict, figure, "## Arms", markdown_table(narrow(with_paper(results))), SPREAD]
    said = notes(results) + losses_in_words(results)
    parts += [*seed_by_seed(results), bullets(close_lines(results)), bullets(said)]
    parts += folded("Numbers of each run", narrow(value_rows(results)))
    parts += folded("Folder, config and commit of each run", run_rows(results))
    values, runs, curves = (f"[{path.name}]({path.as_posix()})" for path in astuple(files_of(study, Path())))
    parts.append(
        f"In full: {values}, {runs}, {curves}. Study file: `{study.path}`. Made by `python launch/results.py` from "
        "these files, which have what the folders had: do not edit."
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def losses_in_words(results: Results) -> list[str]:
    """What the figure lacks: runs of before losses were recorded."""
    of_all, without = len(results.finished), sum(not each.losses for each in results.finished)
    if not without:
        return []
    if without == of_all:
        return ["The runs' losses are not recorded: the figure stays as it was made from their folders."]
    return [
        f"The losses of {without} of the {of_all} finished runs are not recorded: an arm without any has no line in "
        "the figure, which shows no losses at all if that is most of the arms."
    ]


def folded(summary: str, rows: Rows) -> list[str]:
    """A table that a reader opens: the page is of the arms."""
    return [f"<details><summary>{summary}</summary>", markdown_table(rows), "</details>"]


def with_paper(results: Results) -> Rows:
    """The table of the arms, and behind a metric of which the paper says something what it says."""
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
