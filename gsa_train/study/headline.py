"""The headline figure: losses of arms of several studies, which a YAML file lists, by tokens and by training time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from gsa_train.config import ConfigError
from gsa_train.config.load import Problems, build, problem_line, read_yaml
from gsa_train.study.states import is_complete
from gsa_train.study.study_file import Study, StudyRun
from gsa_train.study.values import Over, RunValues

FILE = "headline.yaml"
"""Beside the study files."""
FIGURE = "main.png"


@dataclass(frozen=True)
class LineConfig:
    study: str = ""
    """Name of the study."""
    arm: str = ""
    """Arm of it, of which the first finished seed is drawn."""
    label: str = ""
    """What the legend calls it."""


@dataclass(frozen=True)
class HeadlineConfig:
    title: str = ""
    lines: list[LineConfig] = field(default_factory=list)


@dataclass(frozen=True)
class Headline:
    title: str
    runs: Mapping[str, Sequence[StudyRun]]
    """Label -> all runs of its arm, in the order of the seeds."""


def load_headline(path: Path, studies: Sequence[Study]) -> Headline:
    """The figure that the file asks for.

    Args:
        studies: those that have a page.

    Raises:
        ConfigError: lists everything that is wrong with the file, a line each.
    """
    problems = Problems(HeadlineConfig)
    config = build(HeadlineConfig, read_yaml(path), problems)
    if not problems.lines:
        problems.lines += _mistakes(config, {study.config.name: study for study in studies})
    if problems.lines:
        raise ConfigError(path, problems.lines)
    of_arms = {
        (study.config.name, arm.name): [run for run in study.runs if run.arm == arm.name]
        for study in studies
        for arm in study.config.arms
    }
    return Headline(config.title, {line.label: of_arms[line.study, line.arm] for line in config.lines})


def _mistakes(config: HeadlineConfig, studies: Mapping[str, Study]) -> list[str]:
    found = []
    if not config.title:
        found.append(problem_line("title", config.title, "nothing there", "say what the figure shows"))
    if not config.lines:
        remedy = "list at least one {study: ..., arm: ..., label: ...}"
        found.append(problem_line("lines", config.lines, "nothing there", remedy))
    labels = [line.label for line in config.lines]
    for number, line in enumerate(config.lines):
        where = f"lines.{number}"
        if not line.label or labels.count(line.label) > 1:
            wrong = "there twice" if line.label else "nothing there"
            found.append(problem_line(f"{where}.label", line.label, wrong, "give each line its own"))
        if line.study not in studies:
            wrong = "no study of this name has a question"
            found.append(problem_line(f"{where}.study", line.study, wrong, _one_of(line.study, studies)))
            continue
        arms = [arm.name for arm in studies[line.study].config.arms]
        if line.arm not in arms:
            wrong = f"the study {line.study} has no such arm"
            found.append(problem_line(f"{where}.arm", line.arm, wrong, _one_of(line.arm, arms)))
    return found


def _one_of(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"give one of {', '.join(known)}"


def write_headline(headline: Headline, out: Path) -> tuple[Path | None, list[str]]:
    """Draw each arm's first finished run. Returns the figure and nothing; or, where an arm has no finished run here,
    None and the labels of these: then the figure stays as it is."""
    finished = {label: list(filter(is_complete, runs)) for label, runs in headline.runs.items()}
    if lacking := [label for label, runs in finished.items() if not runs]:
        return None, lacking
    # Here: matplotlib takes half a second, and is there for reports alone.
    from gsa_train.report.plots import Curves, write_curves

    values = {label: RunValues(runs[0]) for label, runs in finished.items()}

    def curves(over: Over, unit: float) -> dict[str, tuple[list[float], list[float]]]:
        points = {label: each.curve("loss", over) for label, each in values.items()}
        return {label: ([x / unit for x, _ in line], [y for _, y in line]) for label, line in points.items()}

    devices = sorted({str(start.get("device")) for each in values.values() for start in each.starts})
    loss = "train loss (nats per token)"
    panels = [
        Curves(loss, curves("tokens", 1), "tokens", counts=True, later=True),
        Curves(loss, curves("seconds", 60), f"minutes of training, on {', '.join(devices)}", later=True),
    ]
    return write_curves(panels, headline.title, out / FIGURE), []
