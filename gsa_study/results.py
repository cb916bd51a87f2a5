"""Write pages of results for the documentation from one template: question, setup, one table, one figure, verdict.

All numbers above the verdict come from the record of the study (`record.py`). A person writes the verdict in the page,
below the heading `## Verdict`, and this text is kept. README.md has a table of all studies, with the first paragraph of
each verdict. A person also writes the text above `## Studies` in README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gsa_study.caveats import origins
from gsa_study.record import files_of
from gsa_study.tables import Results, Rows, arm_rows, bullets, markdown_table, narrow
from gsa_train.config import ConfigError
from gsa_train.files import write_atomically
from gsa_train.metrics.progress import compact

NO_VERDICT = "No verdict yet."
VERDICT, STUDIES = "## Verdict", "## Studies"
HEAD = ["study", "runs", "verdict"]


def write_figure(results: Results, out: Path) -> Path | None:
    """Write a study's figure. Return None if it stays unchanged because no losses are recorded."""
    path = out / f"{results.study.config.name}.png"
    if path.is_file() and not any(each.losses for each in results.finished):
        return None
    # Imported here, because matplotlib takes half a second and only pages and reports need it.
    from gsa_study.figure import write_study_figure

    return write_study_figure(results, path)


def write_page(results: Results, out: Path) -> tuple[list[str], Path]:
    """Write the page, and keep its verdict. Returns the study's row in README.md, and the page's file."""
    study, path = results.study, out / f"{results.study.config.name}.md"
    verdict = read_verdict(path) or NO_VERDICT
    write_text(path, [*page_parts(results), VERDICT, verdict])
    runs = f"{len(results.finished)} of {len(results.runs)}"
    return [f"[{study.title}]({path.name})", runs, verdict.partition("\n\n")[0]], path


def read_verdict(path: Path) -> str:
    """Return the text below the page's heading VERDICT, or "" if there is no page. Raise ConfigError unless it has
    this heading exactly once, because rewriting the page could lose a person's text."""
    if not path.is_file():
        return ""
    _, *found = f"\n{path.read_text(encoding='utf-8')}\n".split(f"\n{VERDICT}\n")
    if len(found) != 1:
        raise ConfigError(path, [f"{len(found)} headings `{VERDICT}`; write one, above the verdict"])
    return found[0].strip()


def write_text(path: Path, parts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n\n".join(filter(None, parts)) + "\n")


def page_parts(results: Results) -> list[str]:
    """The text above the verdict."""
    study = results.study
    values = files_of(study, Path()).values
    return [
        f"# {study.title}",
        study.config.question.strip(),
        setup(results),
        bullets(origins(results)),
        markdown_table(narrow(with_paper(on_page(results)))),
        f"![The first metric of each arm, and losses by tokens and by training time]({study.config.name}.png)",
        "Cells have mean ± standard deviation over the seeds. "
        f"[{values.name}]({values.name}) and [records](records) have all numbers.",
    ]


def setup(results: Results) -> str:
    finished = results.finished
    tokens = sorted({each.tokens or 0 for each in finished})
    of_each = " to ".join(
        compact(count) for count in (tokens if len(tokens) < 3 else (tokens[0], tokens[-1]))
    )
    devices = ", ".join(sorted({device for each in finished for device in each.devices}))
    unrecorded = sum(not each.losses for each in finished)
    said = f"**Setup.** {len(finished)} of {len(results.runs)} runs are finished. Each run trained on"
    said += f" {of_each} tokens on {devices}." if devices else f" {of_each} tokens."
    if unrecorded == len(finished):
        said += " The figure was drawn from the run folders, because [records](records) lack the losses."
    elif unrecorded:
        said += f" The figure lacks {unrecorded} of the runs, because the records have no losses for them."
    return said


def on_page(results: Results) -> Results:
    """Return the results with one column for each metric that the page shows, at its last point."""
    last = {column.key: column for column in results.columns}
    shown = results.study.config.table or list(last)
    return replace(results, columns=tuple(last[key] for key in shown if key in last))


def with_paper(results: Results) -> Rows:
    """Return the table of the arms. The paper's value stands to the right of its metric."""
    head, *rows = arm_rows(results)
    first = len(head) - len(results.columns)
    places = [first + number for number, column in enumerate(results.columns) if column.paper]
    for place in reversed(places):
        column = results.columns[place - first]
        head.insert(place + 1, f"{column.title}: the paper")
        for arm, row in zip(results.arms, rows, strict=True):
            row.insert(place + 1, column.paper.get(arm, ""))
    return [head, *rows]


def write_overview(rows: Rows, out: Path) -> Path:
    """Write README.md: the text that a person writes, and the table of all verdicts."""
    path = out / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else "# Results\n"
    made = "`python launch/results.py` [writes](../how_to/studies.md#pages-of-results) the tables and pages."
    write_text(
        path, [text.partition(f"\n{STUDIES}\n")[0].strip(), STUDIES, markdown_table([HEAD, *rows]), made]
    )
    return path
