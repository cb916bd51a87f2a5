"""Read and write the record of a study in docs/results. The record consists of CSV files, from which the study's page
can be made without the run folders.

`<study>.csv` has each value of each finished run. `records/<study>_runs.csv` has a row for each finished run, and
`records/<study>_curves.csv` has the losses of these runs. All numbers have full precision. If a finished run has a
local folder, its record is replaced. The records of other runs are kept.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gsa_study.columns import Equal, columns_of, equal_of
from gsa_study.run_metrics import LossPoint, RunMetrics
from gsa_study.run_record import RunRecord, record_of_run
from gsa_study.states import TEXT_FIELDS, changed_fields
from gsa_study.study_file import Study
from gsa_study.tables import VALUES_HEAD, Results, csv_text, values_csv, word_of
from gsa_train.config import ConfigError
from gsa_train.files import write_atomically

RUNS_HEAD = (
    "arm", "seed", "tokens", "seconds", "devices", "folder", "commits", "data_fingerprint",
    "equal_tokens", "equal_seconds",
)  # fmt: skip
"""`equal` is the point at which runs are compared, the same in each row. An empty cell means unknown."""
CURVES_HEAD = ("run", "tokens", "seconds", "loss")
MOST_POINTS = 100
"""Approximate number of points of a curve. A figure has no pixels for more."""
BETWEEN = "; "
"""Separates the devices of one run."""
REMEDY = "take the file as it was committed (git restore), or remove the line"


@dataclass(frozen=True)
class Record:
    runs: Mapping[str, RunRecord]
    """Name -> finished run of the study."""
    equal: Equal | None
    """Point at which the runs were compared; None without runs."""
    values: Mapping[tuple[str, str, str], float]
    """(run, key, at) -> value"""
    gone: tuple[str, ...]
    """Runs that the study file no longer asks for."""


@dataclass(frozen=True)
class Files:
    values: Path
    runs: Path
    curves: Path


def files_of(study: Study, out: Path) -> Files:
    name, folder = study.config.name, out / "records"
    return Files(out / f"{name}.csv", folder / f"{name}_runs.csv", folder / f"{name}_curves.csv")


def recorded_results(study: Study, out: Path) -> Results:
    """Return results from the record alone.

    Raises:
        ConfigError: a file of the record is damaged.
    """
    record = read_record(study, out)
    columns = (
        replace(column, values={run: record.values.get((run, column.key, column.at)) for run in record.runs})
        for column in columns_of(study, record.equal)
    )
    others = (RunRecord(run, False, "", run.folder) for run in study.runs)
    runs = tuple(record.runs.get(each.run.name, each) for each in others)
    return Results(study, runs, tuple(columns), {})


def update_record(study: Study, out: Path) -> tuple[list[Path], list[str]]:
    """Write the record with the runs that are finished in local folders.

    Returns the record's files (none if no run is finished), and a line for each missing or removed run or metric.

    Local runs with incomplete records or a changed config are left out. A recorded run without a usable local folder
    keeps its recorded values. If there is such a run, all runs are compared at the recorded `equal_tokens` and
    `equal_seconds`. A local run that ended earlier has no value there.

    Raises:
        ConfigError: a file of the record is damaged.
    """
    record, files = read_record(study, out), files_of(study, out)
    local = [RunMetrics(run) for run in study.runs]
    here, said = _usable({values.run.name: values for values in local if values.complete})
    said += [
        f"left out {values.run.folder}: its summary.json is damaged; copy the whole file, or start the study again"
        for values in local
        if (values.run.folder / "summary.json").is_file() and "steps" not in values.summary
    ]
    runs = {**record.runs, **{name: _thinned(record_of_run(values, {})) for name, values in here.items()}}
    kept = record.runs.keys() - here.keys()
    equal = record.equal if kept else equal_of(list(runs.values()))
    if not runs and not record.gone:
        return [], said
    columns = [
        replace(
            column,
            values={
                run: column.read(here[run])
                if run in here
                else record.values.get((run, column.key, column.at))
                for run in runs
            },
        )
        for column in columns_of(study, equal)
    ]
    in_order = tuple(runs[run.name] for run in study.runs if run.name in runs)
    files.runs.parent.mkdir(parents=True, exist_ok=True)
    # Values come last, because each value needs the row of its run.
    write_atomically(files.runs, csv_text([RUNS_HEAD, *(_run_row(each, equal) for each in in_order)]))
    curves = ((each.run.name, *map(_cell, point)) for each in in_order for point in each.losses)
    write_atomically(files.curves, csv_text([CURVES_HEAD, *curves]))
    write_atomically(files.values, values_csv(Results(study, in_order, tuple(columns), {})))
    asked = {(column.key, column.at) for column in columns}
    lost = {f"{key} ({at})" for run, key, at in record.values if run in kept and (key, at) not in asked}
    not_asked = f"left out of {files.values}, as {study.path} does not ask for it: "
    said += [not_asked + each for each in (*record.gone, *sorted(lost))]
    return [files.values, files.runs, files.curves], said


def _usable(here: Mapping[str, RunMetrics]) -> tuple[dict[str, RunMetrics], list[str]]:
    """Return the usable runs, and a line for each other run. A run is usable if its records reach its last step, and if
    it began with the present config of the study, apart from the paths of texts."""
    kept, left_out = {}, []
    for name, values in here.items():
        if values.records_end_at is not None:
            left_out.append(
                f"left out {values.run.folder}: it is finished, and its records end at step {values.records_end_at} of "
                f"{values.run.steps}; copy its whole metrics.jsonl, or train it again"
            )
            continue
        if not values.tokens:
            left_out.append(f"left out {values.run.folder}: no `tokens` in its metrics.jsonl; train it again")
            continue
        changes = list(changed_fields(values.run, TEXT_FIELDS))
        if not changes:
            kept[name] = values
            continue
        left_out.append(
            f"left out {values.run.folder}, as it began with another config than the study asks for: "
            f"{'; '.join(changes)}; put the study file back, give the arm another name, or give the overrides "
            "(key=value) with which the study was started"
        )
    return kept, left_out


def _thinned(run: RunRecord) -> RunRecord:
    places = thin([point.loss for point in run.losses], MOST_POINTS)
    return replace(run, losses=tuple(run.losses[place] for place in places))


def thin(values: list[float], most: int) -> list[int]:
    """Returns the indices of a curve's points to keep: all if there are at most `most`, else the smallest and the
    largest value in each section, so that no spike is lost."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = {0, len(values) - 1}
    parts = most // 2
    for part in range(parts):
        places = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        finite = [at for at in places if math.isfinite(values[at])]
        if len(finite) < len(places):
            kept.add(next(at for at in places if not math.isfinite(values[at])))  # keep gaps
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def _run_row(run: RunRecord, equal: Equal | None) -> Sequence[object]:
    points = (equal.tokens, equal.seconds) if equal else (None, None)
    numbers = (run.tokens, run.seconds)
    where = (BETWEEN.join(run.devices), run.folder.as_posix(), " ".join(run.commits), run.text)
    return (run.run.arm, run.run.seed, *map(_cell, numbers), *where, *map(_cell, points))


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


# ---- reading


def read_record(study: Study, out: Path) -> Record:
    """Read the record, which is empty if no file exists.

    Raises:
        ConfigError: a file is damaged; names the line.
    """
    files, asked = files_of(study, out), {run.name: run for run in study.runs}
    equals: dict[str, Equal | None] = {}  # by run, including runs that are no longer part of the study
    runs: dict[str, RunRecord] = {}
    values: dict[tuple[str, str, str], float] = {}
    curves: dict[str, list[LossPoint]] = {}

    def add_run(row: Mapping[str, str]) -> None:
        name = f"{row['arm']}-seed{int(row['seed'])}"
        if name in equals:
            raise ValueError(f"{name} stands there twice")
        seconds = _number(row["equal_seconds"])
        equals[name] = Equal(int(row["equal_tokens"]), seconds) if row["equal_tokens"] else None
        if name in asked:
            runs[name] = RunRecord(
                run=asked[name],
                finished=True,
                state="finished",
                folder=Path(row["folder"]),
                tokens=int(row["tokens"]),
                seconds=_number(row["seconds"]),
                devices=tuple(filter(None, row["devices"].split(BETWEEN))),
                commits=tuple(row["commits"].split()),
                text=row["data_fingerprint"],
            )

    def known(name: str) -> str:
        if name not in equals:
            raise ValueError(f"{files.runs} has no run {name}")
        return name

    def add_value(row: Mapping[str, str]) -> None:
        values[known(f"{row['arm']}-seed{row['seed']}"), row["key"], row["at"]] = float(row["value"])

    def add_point(row: Mapping[str, str]) -> None:
        point = LossPoint(float(row["tokens"]), _number(row["seconds"]), float(row["loss"]))
        curves.setdefault(known(row["run"]), []).append(point)

    _read(files.runs, RUNS_HEAD, add_run)
    if equals and not files.values.is_file():
        raise ConfigError(files.values, [f"not there, but {files.runs} has runs; {REMEDY}"])
    _read(files.values, VALUES_HEAD, add_value)
    _read(files.curves, CURVES_HEAD, add_point)
    runs = {name: replace(run, losses=tuple(curves.get(name, ()))) for name, run in runs.items()}
    equal = next(iter(equals.values()), None)
    return Record(runs, equal, values, tuple(name for name in equals if name not in asked))


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _read(path: Path, head: Sequence[str], add: Callable[[Mapping[str, str]], None]) -> None:
    """Call `add` with each row of a CSV. A missing file has no rows.

    Raises:
        ConfigError: the first line that is damaged, or that `add` refuses with a ValueError.
    """
    if not path.is_file():
        return
    try:
        reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"no UTF-8 text ({error}); {REMEDY}"]) from error
    try:
        if next(reader, None) != list(head):
            raise ValueError(f"not the columns {','.join(head)}")
        for row in reader:
            if len(row) != len(head):
                raise ValueError(f"{len(row)} cells, not {len(head)}")
            add(dict(zip(head, map(word_of, row), strict=True)))
    except (ValueError, csv.Error) as error:
        raise ConfigError(path, [f"line {reader.line_num}: {error}; {REMEDY}"]) from error
