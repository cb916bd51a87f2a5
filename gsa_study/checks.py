"""Check a study file. The configs of its runs have their own checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gsa_study.config import AT_LEAST_ZERO, MetricConfig, StudyConfig
from gsa_train.config.file_checks import task_problems
from gsa_train.config.load import PLAIN_NAME, problem_line
from gsa_train.metrics.progress import compact

SET_BY_THE_STUDY = ("run.name", "run.dir", "run.seed", "data.seed")


def mistakes(study: StudyConfig) -> list[str]:
    return [
        *_names(study), *_missing(study), *_numbers(study), *_arms(study), *_evaluations(study), *_metrics(study),
    ]  # fmt: skip


def _names(study: StudyConfig) -> Iterator[str]:
    names = {"name": study.name}
    names |= {f"arms.{number}.name": arm.name for number, arm in enumerate(study.arms)}
    names |= {f"evaluations.{number}.name": each.name for number, each in enumerate(study.evaluations)}
    for field, name in names.items():
        if not PLAIN_NAME.fullmatch(name):
            remedy = "use letters, digits and _, and begin with a letter"
            yield problem_line(field, name, "not a plain name", remedy)
    for section in ("arms", "evaluations"):
        of_items = [each.name for each in getattr(study, section)]
        for name in sorted({name for name in of_items if name and of_items.count(name) > 1}):
            yield problem_line(f"{section}.name", name, "there twice", "give each its own")


def _missing(study: StudyConfig) -> Iterator[str]:
    for field, remedy in {
        "config": "name the base config",
        "arms": "list at least one `- name: ...`",
        "seeds": "list at least one seed",
        "metrics": "list at least one `- key: ...` to compare",
    }.items():
        if not getattr(study, field):
            yield problem_line(field, getattr(study, field), "nothing there", remedy)


def _numbers(study: StudyConfig) -> Iterator[str]:
    found = {"data_parallel": [study.data_parallel]}
    for number, each in enumerate(study.evaluations):
        for name in ("context_lengths", "ruler"):
            found[f"evaluations.{number}.{name}"] = getattr(each, name)
        for name in ("max_tokens", "ruler_samples"):
            found[f"evaluations.{number}.{name}"] = [getattr(each, name)]
    for number, metric in enumerate(study.metrics):
        found[f"metrics.{number}.at_tokens"] = metric.at_tokens
    for field, values in found.items():
        parts = [part for part in field.split(".") if not part.isdigit()]
        least = 0 if ".".join(parts) in AT_LEAST_ZERO else 1
        for value in values:
            if value < least:
                yield problem_line(field, value, f"below {least}", f"give {least} or more")
        if len(set(values)) < len(values):
            yield problem_line(field, values, "a number twice", "list each once")


def _evaluations(study: StudyConfig) -> Iterator[str]:
    names = {arm.name for arm in study.arms}
    for number, each in enumerate(study.evaluations):
        for arm in sorted(set(each.arms) - names):
            remedy = "name some of its arms"
            yield problem_line(f"evaluations.{number}.arms", arm, "the study has no such arm", remedy)
        if each.validation and (each.data or not (each.tasks or each.ruler)):
            wrong = "the run's sets are scored beside tasks and ruler"
            remedy = "leave it out: without data they are scored anyway"
            yield problem_line(f"evaluations.{number}.validation", each.validation, wrong, remedy)


def _arms(study: StudyConfig) -> Iterator[str]:
    seeds = {"seeds": study.seeds} | {
        f"arms.{number}.seeds": arm.seeds for number, arm in enumerate(study.arms)
    }
    for field, values in seeds.items():
        if any(value < 0 for value in values):
            yield problem_line(field, values, "a seed below 0", "give 0 or more")
        if len(set(values)) < len(values):
            yield problem_line(field, values, "a seed twice", "give each run its own")
    sets = {"set": study.set} | {f"arms.{number}.set": arm.set for number, arm in enumerate(study.arms)}
    for field, fields in sets.items():
        for key, value in fields.items():
            if key.strip() in SET_BY_THE_STUDY:
                remedy = "remove it; `seeds`, `name` and `dir` of the study say it"
                yield problem_line(f"{field}.{key}", value, "the study sets it", remedy)


def _metrics(study: StudyConfig) -> Iterator[str]:
    for key in set(study.table) - {metric.key for metric in study.metrics}:
        yield problem_line("table", key, "the study has no such metric", "name the key of one of its metrics")
    for number, metric in enumerate(study.metrics):
        where = f"metrics.{number}"
        for arm in metric.paper.keys() - {arm.name for arm in study.arms}:
            yield problem_line(f"{where}.paper", arm, "the study has no such arm", "name one of its arms")
        if metric.reaches and metric.reaches not in {arm.name for arm in study.arms}:
            wrong = "the study has no such arm"
            yield problem_line(f"{where}.reaches", metric.reaches, wrong, "name one of its arms")
        for name in set(metric.evaluations) - {each.name for each in study.evaluations}:
            yield problem_line(
                f"{where}.evaluations", name, "the study has no such evaluation", "name one of its"
            )
        in_words = [compact(tokens) for tokens in metric.at_tokens]
        for words in sorted({each for each in in_words if in_words.count(each) > 1}):
            wrong = f"two of them are {words} in the columns' headings, by which values are told apart"
            yield problem_line(f"{where}.at_tokens", metric.at_tokens, wrong, "leave one out")
        if not metric.key:
            yield problem_line(f"{where}.key", metric.key, "nothing there", "name what is compared")
        if metric.source == "evaluation" and not study.evaluations:
            wrong = "the study evaluates nothing"
            yield problem_line(f"{where}.source", metric.source, wrong, "list `evaluations`")
        if has_points(metric) and metric.source != "training":
            wrong = "it has one value of each run"
            remedy = "remove at_tokens, equal_time and reaches, or give source: training"
            yield problem_line(f"{where}.source", metric.source, wrong, remedy)
        if metric.statistic != "value" and (has_points(metric) or metric.source != "training"):
            wrong = "it is of all logged steps of a training"
            remedy = "remove at_tokens, equal_time and reaches, or give statistic: value"
            yield problem_line(f"{where}.statistic", metric.statistic, wrong, remedy)


def missing_texts(study: StudyConfig) -> list[str]:
    """Return local texts and tasks of evaluations that do not exist. An evaluation would otherwise fail after the
    training."""
    texts = [
        problem_line(f"evaluations.{number}.data.{name}", place, "not there", "correct the path")
        for number, each in enumerate(study.evaluations)
        for name, place in each.data.items()
        if "://" not in place and not Path(place).exists()
    ]
    fields = {
        f"evaluations.{number}.tasks.{place}": task
        for number, each in enumerate(study.evaluations)
        for place, task in enumerate(each.tasks)
    }
    return texts + [line for field, task in fields.items() for line in task_problems(field, task)]


def has_points(metric: MetricConfig) -> bool:
    return bool(metric.at_tokens) or metric.equal_time or bool(metric.reaches)
