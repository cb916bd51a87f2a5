"""Define every field that a user can set, and the order in which values replace each other:

    dataclass defaults <- YAML file <- key=value on the command line

For example, `model.num_layers` is the field `num_layers` in `model.py`. The text under a field says what the field
means. If a field has a unit, its name contains the unit (`_tokens`, `_steps`, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from gsa_train.config.checkpoint import CheckpointConfig as CheckpointConfig
from gsa_train.config.checks import check_config, check_packages
from gsa_train.config.data import DataConfig as DataConfig
from gsa_train.config.evaluate import EvaluateConfig as EvaluateConfig
from gsa_train.config.file_checks import check_files
from gsa_train.config.gsa import GSAConfig as GSAConfig
from gsa_train.config.load import ConfigError as ConfigError
from gsa_train.config.load import Problems, apply_override, build, parse_yaml, read_yaml
from gsa_train.config.logging import LoggingConfig as LoggingConfig
from gsa_train.config.model import ModelConfig as ModelConfig
from gsa_train.config.model import RopeScalingConfig as RopeScalingConfig
from gsa_train.config.moe import MoEConfig as MoEConfig
from gsa_train.config.monitor import MonitorConfig as MonitorConfig
from gsa_train.config.parallel import ParallelConfig as ParallelConfig
from gsa_train.config.phases import PhaseConfig as PhaseConfig
from gsa_train.config.profile import ProfileConfig as ProfileConfig
from gsa_train.config.run import RunConfig as RunConfig
from gsa_train.config.sections import Config as Config
from gsa_train.config.train import TrainConfig as TrainConfig


def load_config(
    path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None, need_data: bool = True
) -> Config:
    """Load the config of a run: defaults <- the YAML file <- `key=value` overrides.

    Args:
        overrides: `section.field=value`, or `phases.0.field=value` for an item of a list; the last one wins.
        world_size: number of ranks, to check that the fields fit together. None: only read the file and check types, as
            for the saved config of a finished run.
        need_data: with a world size, also check that the local files and the packages that the run needs exist.

    Raises:
        ConfigError: lists every mistake, a line each.
    """
    tree = read_yaml(path)
    problems = Problems(Config)
    for override in overrides:
        apply_override(tree, override, problems)
    config = build(Config, tree, problems)
    if world_size is not None:
        found = check_config(config, world_size)
        if need_data:
            found += check_files(config) + check_packages(config)
        problems.lines += [line for line in found if not problems.explain(line)]
    if problems.lines:
        raise ConfigError(path, problems.lines)
    return config


def config_from_yaml(content: str, path: str | Path) -> Config:
    """Load a config that `config_to_yaml` wrote, as in checkpoints. Missing fields get their defaults.

    Args:
        path: the checkpoint's path, for the message.

    Raises:
        ConfigError: the content is damaged, or has fields of another version.
    """
    problems = Problems(Config, of_checkpoint=True)
    config = build(Config, parse_yaml(content, path), problems)
    if problems.lines:
        raise ConfigError(path, problems.lines)
    return config


def config_to_yaml(config: Config) -> str:
    """Write every field as YAML. `load_config` reads the fields back equal, floats bit for bit."""
    return str(yaml.dump(asdict(config), Dumper=_SAVED_DUMPER, sort_keys=False, allow_unicode=True))


_SAVED_LOADER: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SAVED_DUMPER: type[yaml.SafeDumper] | type[yaml.CSafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Loader and dumper use libyaml if it is installed, because each save writes a config. Pure Python is slow."""


def saved_sections(config_yaml: str) -> Any:
    """Read the text of `config_to_yaml` as dictionaries.

    Raises:
        yaml.YAMLError: the text is damaged.
    """
    try:
        return yaml.load(config_yaml, _SAVED_LOADER)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
