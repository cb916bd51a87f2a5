"""Extract series from a run's metrics.jsonl, for charts."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from gsa_train.metrics.panels import Panel
from gsa_train.metrics.record_checks import fault_of_record, of_other_lengths
from gsa_train.metrics.record_format import Record, read_records, validation_prefixes

logger = logging.getLogger(__name__)


def records_of(run_dir: Path) -> list[Record]:
    """Read metrics.jsonl, in order of the steps. The end of a save is logged some steps later, perhaps in the next
    phase."""
    path = run_dir / "metrics.jsonl"
    records = read_records(path, fault_of_record)
    damaged = of_other_lengths(records)
    if damaged:
        logger.warning("%s: %d records have lists for another number of layers; left out", path, len(damaged))
        records = [record for record in records if not any(record is each for each in damaged)]
    return sorted(records, key=lambda record: int(record["step"]))


def series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of a key, NaN where `with_key` leaves a gap."""
    having = with_key(records, key)
    values = [math.nan if record.get(key) is None else float(record[key]) for record in having]
    return [record["step"] for record in having], values


def phase_starts(records: list[Record]) -> list[tuple[int, str]]:
    """Returns (step, name). A phase starts with the last logged step before it, and the first phase at `first_step`."""
    starts: list[tuple[int, str]] = []
    previous = first_step(records)
    for record in records:
        if not starts or starts[-1][1] != record["phase"]:
            starts.append((previous, record["phase"]))
        previous = record["step"]
    return starts


def first_step(records: list[Record]) -> int:
    """Returns the first step of the series. A record covers the steps since the previous record, so the first starts
    earlier."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    return max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else max(0, steps[0] - 1)


def with_key(records: list[Record], key: str) -> list[Record]:
    """Returns records that have a value, and records of phases that never have a value. No line may cross such a
    gap."""
    phases = {record["phase"] for record in records if record.get(key) is not None}
    return [record for record in records if record.get(key) is not None or record["phase"] not in phases]


def flat(record: Record) -> Record:
    """Returns the record with entries of dicts as separate keys: `lrs: base`, `validation_loss_by_source:
    Wikipedia`."""
    flat: Record = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {name}": number for name, number in value.items()}
        else:
            flat[key] = value
    return flat


@dataclass(frozen=True)
class Known:
    """Lists the keys in a run's records. They are computed once for all panels, because a long run has tens of
    thousands of records."""

    keys: Collection[str]
    validation_sets: Mapping[str, str]
    """Prefix of a set's keys -> its name."""


def known_of(records: list[Record]) -> Known:
    sets = {prefix: name for record in records for prefix, name in validation_prefixes(record).items()}
    return Known(dict.fromkeys(chain.from_iterable(records)), sets)


def with_all_lines(panel: Panel, known: Known) -> Panel:
    """Returns the panel with a line for each learning rate or source, and each validation set, in the records."""
    lines = dict(panel.lines)
    if panel.per_entry:
        entry = f"{panel.per_entry}: "
        lines |= {key: key.removeprefix(entry) for key in known.keys if key.startswith(entry)}
    if panel.per_set:
        for prefix, name in known.validation_sets.items():
            key = f"{prefix}_{panel.per_set}"
            lines[key] = "validation" if name == "validation" else f"validation {name}"
            sources = [each for each in known.keys if each.startswith(f"{key}: ")]
            lines |= {each: f"{name}: {each.removeprefix(f'{key}: ')}" for each in sources}
    return replace(panel, lines=lines)


def has(records: list[Record], key: str) -> bool:
    return any(record.get(key) is not None for record in records)


def token_knots(records: list[Record]) -> list[tuple[int, int]]:
    """Returns (step, tokens) between which tokens grow linearly, or an empty list if unknown. They are the ends, and
    the steps where the batch size changed at a resume or batches were skipped."""
    counted = {
        record["step"]: record["tokens"] for record in records if record.get("tokens") and record["step"]
    }
    knots: list[tuple[int, int]] = []
    for point in sorted(counted.items()):
        knots = knots or [(0, 0)]
        if len(knots) > 1:
            (step_0, tokens_0), (step_1, tokens_1) = knots[-2:]
            if (tokens_1 - tokens_0) * (point[0] - step_1) == (point[1] - tokens_1) * (step_1 - step_0):
                knots.pop()
        knots.append(point)
    return knots


def tokens_at(knots: list[tuple[int, int]], steps: Sequence[float]) -> list[float]:
    """Returns the tokens seen after each of these steps. Beyond the last knot, tokens are extrapolated from the last
    two."""
    (step_0, tokens_0), (step_1, tokens_1) = knots[-2:]
    slope = (tokens_1 - tokens_0) / (step_1 - step_0)
    xs, ys = zip(*knots, strict=True)
    return [
        tokens_1 + (step - step_1) * slope if step > step_1 else float(np.interp(step, xs, ys))
        for step in steps
    ]


def names_of(run_dirs: list[Path]) -> dict[str, Path]:
    """Returns folder names, or whole paths if two runs have the same name."""
    names = [run.resolve().name for run in run_dirs]
    return {
        name if names.count(name) == 1 else str(run): run for name, run in zip(names, run_dirs, strict=True)
    }


def is_own(path: Path, folder: Path) -> bool:
    """Whether a path lies in this run's folder, which may itself be a link. The target of another link may be any file
    of the user, so the path is skipped with a warning."""
    own = path.resolve().is_relative_to(folder.resolve())
    if not own:
        logger.warning("%s is a link that leads out of %s; left out", path, folder)
    return own


def shown_range(
    lines: Sequence[tuple[Sequence[float], Sequence[float | None]]],
) -> tuple[float, float] | None:
    """Returns bounds of a linear y axis that ignore the first steps and outliers, or None for the range of all values.

    The bounds cover the values after the first tenth of the x axis, except outliers. The spread is the
    distance from the 2nd to the 98th percentile. An outlier lies more than half the spread below the 2nd or
    above the 98th percentile. A double-click shows a chart's whole range.

    Args:
        lines: x and y of each.
    """
    points = [
        (x, y) for xs, ys in lines for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)
    ]
    if len(points) < 10:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    later = [y for x, y in points if x >= first + (last - first) / 10]
    low, high = np.quantile(later, [0.02, 0.98])
    reach = (high - low) / 2
    low, high = max(low - reach, min(later)), min(high + reach, max(later))
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    bounds = float(low - margin), float(high + margin)
    return bounds if all(map(math.isfinite, bounds)) else None
