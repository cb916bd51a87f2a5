"""The headline figure: losses of arms of several studies, which a YAML file lists, by tokens and by training time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from gsa_study.study_file import Study
from gsa_study.tables import Results
from gsa_train.config import ConfigError
from gsa_train.config.load import Problems, build, problem_line, read_yaml

FILE = "headline.yaml"
"""Beside the study files."""
FIGURE = "main.png"


@dataclass(frozen=True)
class LineConfig:
    study: str = ""
    """Name of the study."""
    arm: str = ""
    """Arm of it. Of all arms the same seed is drawn: another one is another text."""
    label: str = ""
    """What the legend calls it."""


@dataclass(frozen=True)
class HeadlineConfig:
    title: str = ""
    lines: list[LineConfig] = field(default_factory=list)


@dataclass(frozen=True)
class Headline:
    title: str
    arms: Mapping[str, tuple[str, str]]
    """Label -> study and arm."""


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
    return Headline(config.title, {line.label: (line.study, line.arm) for line in config.lines})


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


def write_headline(
    headline: Headline, studies: Mapping[str, Results], out: Path
) -> tuple[Path | None, list[str]]:
    """Draw the arms' runs of the first seed of which all have recorded losses. Returns the figure and nothing; or, if
    there is no such seed, None and the labels of the arms that the nearest one lacks: then the figure stays as it is.

    Args:
        studies: name -> results.
    """
    runs = {
        label: {
            each.run.seed: each for each in studies[study].finished if each.run.arm == arm and each.losses
        }
        for label, (study, arm) in headline.arms.items()
    }
    seeds = {seed for of_arm in runs.values() for seed in of_arm}
    lacking = {seed: [label for label in runs if seed not in runs[label]] for seed in sorted(seeds)}
    seed = min(lacking, key=lambda each: len(lacking[each]), default=None)
    if seed is None or lacking[seed]:
        return None, list(runs) if seed is None else lacking[seed]
    drawn = {label: of_arm[seed] for label, of_arm in runs.items()}
    # Here: matplotlib takes half a second, and is there for reports alone.
    from gsa_eval.report.plots import Curves, write_curves

    by_tokens, by_time = {}, {}
    for label, run in drawn.items():
        timed = [(point.seconds / 60, point.loss) for point in run.losses if point.seconds is not None]
        by_time[label] = ([minutes for minutes, _ in timed], [loss for _, loss in timed])
        by_tokens[label] = ([point.tokens for point in run.losses], [point.loss for point in run.losses])
    devices = sorted({device for run in drawn.values() for device in run.devices})
    loss = "train loss (nats per token)"
    panels = [
        Curves(loss, by_tokens, "tokens", counts=True, later=True),
        Curves(loss, by_time, f"minutes of training, on {', '.join(devices)}", later=True),
    ]
    return write_curves(panels, headline.title, out / FIGURE), []
