"""Define the columns of a study's tables. A column has one value for each run: at a given number of tokens, after a
given training time, over all steps, or at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gsa_study.config import MetricConfig
from gsa_study.jobs import evaluations_of
from gsa_study.run_metrics import Over, RunMetrics, first_reached, interpolate, number_of
from gsa_study.run_record import RunRecord
from gsa_study.study_file import Study
from gsa_train.metrics.progress import compact, duration

STATISTICS = {
    "max": "largest of all steps",
    "median": "median of all steps",
    "last": "at the end of each run",
}
"""Words for the point at which a column is read."""


@dataclass(frozen=True)
class Equal:
    """The point at which runs are compared: the largest tokens and time that all finished runs reached."""

    tokens: int
    seconds: float | None
    """None if the time of a run is unknown."""


def equal_of(runs: Sequence[RunRecord]) -> Equal | None:
    """Returns the point of comparison of all finished runs, or None if no run is finished."""
    finished = [each for each in runs if each.finished and each.tokens]
    times = [each.seconds for each in finished if each.seconds is not None]
    seconds = min(times) if len(times) == len(finished) > 0 else None
    return Equal(min(each.tokens or 0 for each in finished), seconds) if finished else None


@dataclass(frozen=True)
class Column:
    """One number of each run."""

    title: str
    key: str
    at: str
    """Point at which the value is read, in words. Key and point together are unique in a study."""
    read: Callable[[RunMetrics], float | None]
    """Reads the value from a local run folder."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """Arm -> the paper's value. Only the last column of a metric has it."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """Run -> value, for the finished runs."""


def columns_of(study: Study, equal: Equal | None) -> list[Column]:
    """Return the columns of the study in their order, without values. If `equal` is None, leave out the columns that
    compare runs at equal tokens or at equal time."""
    columns: list[Column] = []
    for metric in study.config.metrics:
        found = _of_metric(study, metric, equal)
        columns += [*found[:-1], *(replace(last, paper=metric.paper) for last in found[-1:])]
    return columns


def _of_metric(study: Study, metric: MetricConfig, equal: Equal | None) -> list[Column]:
    key, title = metric.key, metric.label or metric.key
    if metric.source == "summary":
        return [Column(title, key, "at the end", lambda run: number_of(run.summary.get(key)))]
    if metric.source == "evaluation":
        return [
            Column(f"{title}, {name}", key, f"evaluation {name}", _of_evaluation(name, key))
            for name in _evaluations(study, metric)
        ]
    if (statistic := metric.statistic) != "value":
        return [Column(title, key, STATISTICS[statistic], lambda run: run.statistic(key, statistic))]
    return [*_at_points(metric, title, equal), *_reaching(study, metric, title)] if equal else []


def _evaluations(study: Study, metric: MetricConfig) -> dict[str, None]:
    return dict.fromkeys(
        name
        for each in study.config.evaluations
        if not metric.evaluations or each.name in metric.evaluations
        for run in study.runs
        for name, _ in evaluations_of(each, run)
    )


def _of_evaluation(name: str, key: str) -> Callable[[RunMetrics], float | None]:
    return lambda run: run.of_evaluation(name, key)


def _at_points(metric: MetricConfig, title: str, equal: Equal) -> list[Column]:
    key, columns = metric.key, []
    for tokens in metric.at_tokens or (equal.tokens,):
        at = f"at {compact(tokens)} tokens"
        columns.append(Column(f"{title}, {at}", key, at, _of_curve(key, "tokens", tokens)))
    if metric.equal_time and equal.seconds is not None:
        at = f"at {duration(equal.seconds)} of training"
        columns.append(Column(f"{title}, {at}", key, at, _of_curve(key, "seconds", equal.seconds)))
    return columns


def _reaching(study: Study, metric: MetricConfig, title: str) -> list[Column]:
    others = {run.seed: RunMetrics(run) for run in study.runs if run.arm == metric.reaches}

    def read(over: Over, unit: float, run: RunMetrics) -> float | None:
        other = others.get(run.run.seed)
        end = other.curve(metric.key, over)[-1:] if other is not None and other.complete else []
        reached = first_reached(run.curve(metric.key, over), end[0][1]) if end else None
        return None if reached is None else reached / unit

    columns: tuple[tuple[str, Over, float], ...] = (("tokens", "tokens", 1), ("minutes", "seconds", 60))
    return [
        Column(f"{title}: {at}", metric.key, at, partial(read, over, unit))
        for name, over, unit in columns * bool(others)
        if (at := f"{name} to the end of {metric.reaches}")
    ]


def _of_curve(key: str, over: Over, x: float) -> Callable[[RunMetrics], float | None]:
    return lambda run: interpolate(run.curve(key, over), x)
