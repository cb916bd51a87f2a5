"""Format a study's results as tables of arms, values and runs, in Markdown and CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gsa_study.columns import Column, columns_of, equal_of
from gsa_study.run_metrics import RunMetrics
from gsa_study.run_record import RunRecord, record_of_run
from gsa_study.spread import Spread, difference, spread_of, written
from gsa_study.study_file import Study, StudyRun
from gsa_train.metrics.progress import compact, duration
from gsa_train.model.flops import count_parameters

Rows = list[list[str]]
"""Rows of a table. The first row is the head."""


@dataclass(frozen=True)
class Results:
    study: Study
    runs: tuple[RunRecord, ...]
    """In the order of the study."""
    columns: tuple[Column, ...]
    failures: Mapping[str, str]
    """Job -> why it failed."""
    values: tuple[RunMetrics, ...] = ()
    """All that the runs have logged, in the same order; empty if the results come from a record."""

    @property
    def finished(self) -> list[RunRecord]:
        return [each for each in self.runs if each.finished]

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.study.config.arms]

    def runs_of(self, arm: str) -> list[StudyRun]:
        return sorted((run for run in self.study.runs if run.arm == arm), key=lambda run: run.seed)

    def by_seed(self, arm: str, column: Column) -> dict[int, float | None]:
        return {run.seed: column.values.get(run.name) for run in self.runs_of(arm)}

    def spread(self, arm: str, column: Column) -> Spread:
        return spread_of(self.by_seed(arm, column).values())


def read_results(study: Study, failures: Mapping[str, str]) -> Results:
    values = tuple(RunMetrics(run) for run in study.runs)
    runs = tuple(record_of_run(each, failures) for each in values)
    finished = [each for each in values if each.complete and each.tokens]
    columns = (
        replace(column, values={each.run.name: column.read(each) for each in finished})
        for column in columns_of(study, equal_of(runs))
    )
    return Results(study, runs, tuple(columns), failures, values)


def arm_rows(results: Results) -> Rows:
    """Return a row for each arm and a column for each metric. A cell has the mean and the deviation over the finished
    runs of the arm. A page shows this table in the form that `narrow` returns."""
    rows = [["arm", "parameters", "runs", *(column.title for column in results.columns)]]
    for arm in results.arms:
        runs = results.runs_of(arm)
        count = count_parameters(runs[0].config.model, runs[0].config.gsa, runs[0].config.moe)
        finished = sum(each.run.arm == arm for each in results.finished)
        of_runs = str(finished) if finished == len(runs) else f"{finished} of {len(runs)}"
        means = (written(results.spread(arm, column)) for column in results.columns)
        rows.append([arm, compact(count.total), of_runs, *means])
    return rows


def value_rows(results: Results) -> Rows:
    """Return a row per run, with each number that goes into the means."""
    head = ["run", *(column.title for column in results.columns)]
    rows = []
    for each in results.finished:
        numbers = (column.values.get(each.run.name) for column in results.columns)
        rows.append([each.run.name, *("–" if value is None else f"{value:.6g}" for value in numbers)])
    return [head, *rows]


def run_rows(results: Results, folder_of: Path) -> Rows:
    """Return a row per run, with its place, relative to `folder_of`, and its settings."""
    head = ["run", "state", "tokens", "training time", "device", "folder", "config", "commit"]
    rows = []
    for each in results.runs:
        folder = os.path.relpath(each.folder.resolve(), folder_of.resolve())
        tokens = compact(each.tokens) if each.tokens is not None else "–"
        seconds = duration(each.seconds) if each.seconds is not None else "–"
        config = f"{folder}/config.yaml" if each.commits else "–"
        rows.append([
            each.run.name, each.state or "not finished", tokens, seconds, ", ".join(each.devices) or "–", folder,
            config, ", ".join(map(short, each.commits)) or "–",
        ])  # fmt: skip
    return [head, *rows]


def short(commit: str) -> str:
    return commit[:12] + "+" * commit.endswith("+")


def seed_rows(results: Results) -> Rows:
    """Return a row for each arm after the first arm. For the study's first metric, the row gives the mean difference
    from the first arm, computed seed by seed. An arm that shares fewer than two seeds with the first arm has no row."""
    if not results.columns:
        return []
    first, column = results.arms[0], results.columns[0]
    beside = results.by_seed(first, column)
    rows = []
    for arm in results.arms[1:]:
        apart = difference(results.by_seed(arm, column), beside)
        if apart.deviation is not None:
            rows.append([arm, str(apart.n), written(apart)])
    return [["arm", "seeds", f"{column.title}, less {first}"], *rows] if rows else []


# ---- as text


SPREAD = (
    "Mean ± standard deviation over the seeds. Training time counts each step with the median of its phase."
)


SEEDS = (
    "Arms of one seed read the same text and begin with the same weights, as far as their shapes agree: what a seed "
    "does to both is not in their difference."
)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def narrow(rows: Rows) -> Rows:
    """Transpose a table with more columns than rows, so that few arms with many metrics have a column each."""
    return [list(column) for column in zip(*rows, strict=True)] if len(rows[0]) > len(rows) else rows


def markdown_table(rows: Rows) -> str:
    """Format a table. Names and words are aligned to the left, numbers to the right."""
    head, *body = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    columns = list(zip(*body, strict=True))[1:] or [()] * (len(head) - 1)
    rules = ["---:" if all(map(_is_number, cells)) else "---" for cells in columns]
    lines = [head, ["---", *rules], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_number(cell: str) -> bool:
    return cell in ("", "–", "?") or (cell[0].isdigit() and len(cell.split()) <= 3) or cell[0] in "-−"


def arms_csv(results: Results) -> str:
    """Return n, mean and deviation of each arm and column, in full precision."""
    rows: list[Sequence[object]] = [("arm", "metric", "key", "at", "n", "mean", "deviation", "not_finite")]
    for column in results.columns:
        for arm in results.arms:
            found = results.spread(arm, column)
            numbers = ("" if value is None else repr(value) for value in (found.mean, found.deviation))
            rows.append((arm, column.title, column.key, column.at, found.n, *numbers, found.not_finite))
    return csv_text(rows)


VALUES_HEAD = ("arm", "seed", "metric", "key", "at", "value", "folder", "config", "commits")
"""Columns of the record's values."""


def values_csv(results: Results) -> str:
    """Return the value of each finished run and column in full precision, with folder, config and commit."""
    rows: list[Sequence[object]] = [VALUES_HEAD]
    for column in results.columns:
        for each in results.finished:
            value = column.values.get(each.run.name)
            if value is None:
                continue
            run = each.run
            where = (each.folder.as_posix(), (each.folder / "config.yaml").as_posix(), " ".join(each.commits))
            rows.append((run.arm, run.seed, column.title, column.key, column.at, repr(value), *where))
    return csv_text(rows)


FORMULA = tuple("=+-@\t\r")
"""Spreadsheets take a cell that begins with one of these for a formula, unless it is a number."""


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Write CSV. If a cell's text begins with a character such as `=`, a spreadsheet would take the text for a formula.
    Such a cell therefore gets a leading apostrophe. Text from a run folder, for example a device name, may begin with
    such a character."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(each) for each in row] for row in rows)
    return text.getvalue()


def word_of(cell: str) -> str:
    """Return the text that `csv_text` was given."""
    return cell[1:] if cell[:1] == "'" and cell[1:].startswith(FORMULA) else cell


def _cell(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
