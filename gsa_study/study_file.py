"""Read a study file and list its runs. All mistakes are reported at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gsa_study.checks import SET_BY_THE_STUDY, missing_texts, mistakes
from gsa_study.config import ArmConfig, StudyConfig
from gsa_train.config import Config, ConfigError, load_config
from gsa_train.config.batch_ramp import tokens_before
from gsa_train.config.checks import check_config, check_packages
from gsa_train.config.file_checks import check_files
from gsa_train.config.load import Problems, build, problem_line, read_yaml
from gsa_train.planning.choices import unknown_choices


@dataclass(frozen=True)
class StudyRun:
    arm: str
    seed: int
    config_path: str
    """Value of `launch/pretrain.py --config`."""
    overrides: tuple[str, ...]
    """All `key=value` of the command line."""
    config: Config
    """The loaded config."""
    ranks: int

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir) / self.config.run.name

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.config.phases)

    @property
    def tokens(self) -> int:
        return tokens_before(self.config.train, self.steps)


@dataclass(frozen=True)
class Study:
    path: Path
    config: StudyConfig
    runs: tuple[StudyRun, ...]
    """All arms with the first seed, then all arms with the second, so that the arms of a study that stops early can be
    compared."""

    @property
    def folder(self) -> Path:
        return Path(self.config.dir) / self.config.name

    @property
    def title(self) -> str:
        return self.config.title or self.config.name


def load_study(path: str | Path, overrides: Sequence[str] = (), need_data: bool = True) -> Study:
    """Load a study from a YAML file.

    Args:
        overrides: `section.field=value` of all arms. They override the file's `set`, but not the `set` of an arm.
        need_data: also check that the text of each run exists.

    Raises:
        ConfigError: lists every mistake in the file or in an arm's config, a line each.
    """
    tree = read_yaml(path, "study")
    problems = Problems(StudyConfig)
    study = build(StudyConfig, _with_lists_as_text(tree), problems)
    if not problems.lines:
        problems.lines += mistakes(study)
        problems.lines += missing_texts(study) if need_data else []
    if problems.lines:
        raise ConfigError(path, problems.lines)
    if clashes := _not_to_override(study, overrides):
        raise ConfigError(path, clashes)
    beside = Path(path).parent / study.config
    config_path = str(beside) if beside.is_file() else study.config
    runs: dict[str, list[StudyRun]] = {}
    wrong: dict[str, list[str]] = {}
    for arm in study.arms:
        try:
            runs[arm.name] = _runs_of(arm, study, (config_path, *overrides), need_data)
        except ConfigError as error:
            for line in error.problems:
                wrong.setdefault(line, []).append(arm.name)
    if wrong:
        everywhere = {line for line, arms in wrong.items() if len(arms) == len(study.arms) > 1}
        said = ("all arms" if line in everywhere else _arms_in_words(arms) for line, arms in wrong.items())
        raise ConfigError(path, [f"{arms}: {line}" for arms, line in zip(said, wrong, strict=True)])
    by_seed = zip_longest(*(runs[arm.name] for arm in study.arms))
    in_order = tuple(run for of_seed in by_seed for run in of_seed if run is not None)
    return Study(Path(path), study, in_order)


def _not_to_override(study: StudyConfig, overrides: Sequence[str]) -> list[str]:
    """Return a mistake for each override of a field in which arms differ, or that the study sets itself."""
    found = []
    for word in overrides:
        field, _, value = word.partition("=")
        arms = [arm.name for arm in study.arms if any(_overlap(field, key) for key in arm.set)]
        of_study = "the study (by `seeds`, `name` and `dir`)" if field.strip() in SET_BY_THE_STUDY else ""
        if who := of_study or (_arms_in_words(arms) if arms else ""):
            found.append(problem_line(field, value, f"{who} sets it", "leave it out"))
    return found


def _overlap(field: str, other: str) -> bool:
    """Return whether one of two fields contains the other, as `phases` contains `phases.0.lr`."""
    return f"{field}.".startswith(f"{other}.") or f"{other}.".startswith(f"{field}.")


def _arms_in_words(names: Sequence[str]) -> str:
    return f"{'arm' if len(names) == 1 else 'arms'} {', '.join(names)}"


def _with_lists_as_text(tree: dict[Any, Any]) -> dict[Any, Any]:
    """In the `set` of a study file, a value may be a list, such as the list of all phases. Convert it to the text that
    would follow `phases=` on a command line."""
    arms = tree.get("arms")
    for part in (tree, *(arms if isinstance(arms, list) else [])):
        fields = part.get("set") if isinstance(part, dict) else None
        if isinstance(fields, dict):
            lists = {key: value for key, value in fields.items() if isinstance(value, list)}
            fields.update({key: json.dumps(value, ensure_ascii=False) for key, value in lists.items()})
    return tree


def _runs_of(arm: ArmConfig, study: StudyConfig, base: Sequence[str], need_data: bool) -> list[StudyRun]:
    """Return a run for each seed. One config is read and checked, because only the seed differs.

    Args:
        base: path of the base config, and fields of all arms.
    """
    config_path, *of_all_arms = base
    of_study, of_arm = (
        [f"{key}={value}" for key, value in fields.items()] for fields in (study.set, arm.set)
    )
    fields = (*of_study, *of_all_arms, *of_arm)
    folder = str(Path(study.dir) / study.name)
    config = load_config(config_path, [*fields, f"run.dir={folder}"])
    parallel = config.parallel
    ranks = math.prod((parallel.tensor, parallel.context, parallel.pipeline, study.data_parallel))
    found = [*check_config(config, max(ranks, 1)), *unknown_choices(config)]
    if need_data:
        found += [*check_files(config), *check_packages(config)]
    if found:
        raise ConfigError(config_path, found)
    runs = []
    for seed in arm.seeds or study.seeds:
        name = f"{arm.name}-seed{seed}"
        of_seed = (f"run.seed={seed}", f"data.seed={seed}", f"run.dir={folder}", f"run.name={name}")
        own = replace(
            config, run=replace(config.run, seed=seed, name=name), data=replace(config.data, seed=seed)
        )
        runs.append(StudyRun(arm.name, seed, config_path, (*fields, *of_seed), own, ranks))
    return runs
