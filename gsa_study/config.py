"""`launch/study.py --study FILE`: runs that are compared with each other, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArmConfig:
    name: str = ""
    """Name of the arm: letters, digits and _. Its runs are in the folders `<name>-seed<N>` of the study."""
    set: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """Fields in which the arm differs from the base config, `section.field: value`. A list, such as all `phases`, is
    written in YAML. The study itself sets `run.name`, `run.dir`, `run.seed` and `data.seed`."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of this arm's runs. Empty: the study's seeds."""


@dataclass(frozen=True)
class EvaluationConfig:
    name: str = ""
    """`launch/evaluate.py` evaluates each run under this name. The results are in `evaluations/<name>` of the run's
    folder. If lengths are listed, the name ends with `-L<length>`."""
    arms: list[str] = field(default_factory=list)
    """Arms that are evaluated, each in a start of its own. Empty: all."""
    data: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """Texts to evaluate on, `name: place`, as for `--data`. Empty: the run's validation sets, or none if there are
    `tasks` or `ruler`."""
    validation: bool = False
    """Also score the run's validation sets if there are `tasks` or `ruler`."""
    context_lengths: list[int] = field(default_factory=list)
    """Context lengths in tokens, each in its own evaluation. Empty: as in training."""
    max_tokens: int = 0
    """Tokens of each text. 0: all of it, or for validation sets the same number as in training."""
    tasks: list[str] = field(default_factory=list)
    """Request files and tasks of lm-evaluation-harness, as for `--tasks`. A FILE.yaml runs the code that it names."""
    ruler: list[int] = field(default_factory=list)
    """Lengths of RULER's prompts in tokens. Empty: no RULER."""
    ruler_samples: int = 50
    """Samples of each RULER task and length."""
    settings: list[str] = field(default_factory=list)
    """`key=value`, as for `launch/evaluate.py`."""


@dataclass(frozen=True)
class MetricConfig:
    key: str = ""
    """Key of the compared value in metrics.jsonl, summary.json or an evaluation's results.json. For example,
    `eval_bits_per_byte` is the mean over the tasks, and `eval_bits_per_byte: piqa_val_rc_5shot` is one task. In
    results.json dots separate the levels (`data.validation.loss`), and a number selects an item of a list (0: the
    first)."""
    label: str = ""
    """Heading of its column. Empty: the key."""
    source: Literal["training", "summary", "evaluation"] = "training"
    """File that has the key: metrics.jsonl (`training`), summary.json, or results.json of every evaluation."""
    evaluations: list[str] = field(default_factory=list)
    """With `source: evaluation`, the names of the evaluations. Empty: all."""
    statistic: Literal["value", "max", "median", "last"] = "value"
    """How a run's training records give one value: `value` takes the value at one point, and `max`, `median` and `last`
    take the largest, the median or the last value. `last` is for task scores at the end."""
    at_tokens: list[int] = field(default_factory=list)
    """Trained tokens at which the value is read, interpolated linearly between two records. Empty: the
    largest number that every finished run has."""
    equal_time: bool = False
    """Also read the value at equal time, which is the longest training time that all finished runs reached. Every step
    of a phase counts as the phase's median step time, so compilation, validation, saves and restarts do not count."""
    reaches: str = ""
    """Name of an arm, or empty. For each run, also give the tokens and minutes of training after which the value first
    falls to the last value of the named arm's run with the same seed."""
    paper: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """What the paper reports for an arm, `arm: words`, for the page of `launch/results.py`."""


@dataclass(frozen=True)
class StudyConfig:
    name: str = ""
    """Name of the study: letters, digits and _. Its folder is `<dir>/<name>`."""
    title: str = ""
    """Heading of the report. Empty: the name."""
    question: str = ""
    """Question that the study asks. `launch/results.py` makes pages of studies with a question."""
    dir: str = "runs/studies"
    """Folder that holds the folders of studies."""
    config: str = ""
    """Base config: a file in the folder of the study file, or a value of `launch/pretrain.py --config`."""
    seeds: list[int] = field(default_factory=lambda: [1])
    """Seeds. Each arm is trained once with each seed, as `run.seed` (initial weights) and `data.seed` (order of the
    text). Arms with the same seed read the same text in the same order."""
    set: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """Fields in which all arms differ from the base config. An arm's own `set` overrides them."""
    data_parallel: int = 1
    """Data-parallel ranks of each run. A run has this x `parallel.tensor` x `context` x `pipeline` ranks."""
    arms: list[ArmConfig] = field(default_factory=list)
    """The arms, in the order of the tables."""
    evaluations: list[EvaluationConfig] = field(default_factory=list)
    """Evaluations after each run. Empty: none."""
    metrics: list[MetricConfig] = field(default_factory=list)
    """Metrics that are compared, in the order of the tables."""
    table: list[str] = field(default_factory=list)
    """Keys of the metrics that the page of results shows, each at its last point. Empty: all."""


AT_LEAST_ZERO = frozenset(["evaluations.max_tokens"])
"""Integers that may be 0; the others are at least 1."""
