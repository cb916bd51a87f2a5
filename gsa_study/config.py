"""`launch/study.py --study FILE`: runs that are compared with each other, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArmConfig:
    name: str = ""
    """Name of the arm: letters, digits and _. Its runs are in the folders `<name>-seed<N>` of the study."""
    set: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """What the arm has otherwise than the base config, `section.field: value`. A list, as all `phases`, is written as
    YAML has it. Not `run.name`, `run.dir`, `run.seed` and `data.seed`, which the study sets."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of this arm's runs. Empty: the study's seeds."""
    initial_weights: str = ""
    """Arm with whose weights this one begins, as `checkpoint.initial_weights` does: seed by seed, and in the same text
    where that one stopped reading. It is trained first, and once for all arms that name it. Empty: no arm."""
    initial_step: int = 0
    """Step of that arm: its last one, or one that its `checkpoint.keep_every_steps` keeps. 0 = its last."""


@dataclass(frozen=True)
class EvaluationConfig:
    name: str = ""
    """Name of the evaluation, which `launch/evaluate.py` runs after each run. Its results are in `evaluations/<name>`
    of the run's folder, with `-L<length>` and `-k<k_base>` after the name where lengths and budgets are listed."""
    arms: list[str] = field(default_factory=list)
    """Arms that are evaluated: each evaluation is a start of its own. Empty: all."""
    data: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """Texts, `name: place`, as `--data` takes them. Empty: the run's validation sets, or nothing beside `tasks` and
    `ruler`."""
    validation: bool = False
    """Beside `tasks` and `ruler` score the run's validation sets, too."""
    context_lengths: list[int] = field(default_factory=list)
    """Context lengths in tokens, an evaluation for each. Empty: as in training."""
    k_base: list[int] = field(default_factory=list)
    """Values of `gsa.k_base`, an evaluation for each, with `gsa.k_min` and `gsa.k_max` moved as far as needed; arms
    without an indexer are evaluated once. Empty: as in training."""
    max_tokens: int = 0
    """Tokens of each text; 0 = all of it (validation sets: the same number as in training)."""
    tasks: list[str] = field(default_factory=list)
    """Request files and tasks of lm-evaluation-harness, as `--tasks` takes them; a FILE.yaml runs the code it names."""
    task_examples: int = 0
    """Examples of each task; 0 = all."""
    ruler: list[int] = field(default_factory=list)
    """Lengths of RULER's prompts in tokens. Empty: no RULER."""
    ruler_tasks: list[str] = field(default_factory=list)
    """Tasks of RULER. Empty: all that need no questions."""
    ruler_samples: int = 50
    """Samples of each of its tasks and lengths."""
    ruler_gold: bool = False
    """Score RULER's expected answers in bits per byte, instead of answers that the model writes."""
    settings: list[str] = field(default_factory=list)
    """`key=value`, as `launch/evaluate.py` takes them."""


@dataclass(frozen=True)
class MetricConfig:
    key: str = ""
    """What is compared: a key of the records in metrics.jsonl (of scores of tasks `eval_bits_per_byte`, the mean over
    the tasks, or `eval_bits_per_byte: piqa_val_rc_5shot`, of one), of summary.json, or of an evaluation's results.json,
    there with a dot between the levels (`data.validation.loss`; of a list the number, from 0)."""
    label: str = ""
    """Heading of its column. Empty: the key."""
    source: Literal["training", "summary", "evaluation"] = "training"
    """Which file has the key: metrics.jsonl (`training`), summary.json, or results.json of every evaluation."""
    evaluations: list[str] = field(default_factory=list)
    """With `source: evaluation`, the names of the evaluations. Empty: all."""
    statistic: Literal["value", "max", "median", "last"] = "value"
    """What of the training records: the value at one point; or the largest, the median or the last of what a run has
    logged, without what a run with whose weights it begins has. `last` is for scores of tasks, made at the end."""
    at_tokens: list[int] = field(default_factory=list)
    """Tokens trained on at which the value is read, between two records on the straight line between them. Empty: the
    most that all finished runs have with whose weights no other one begins. An arm that begins with another's counts
    that one's, too."""
    equal_time: bool = False
    """Read the value once more at equal time: at the longest training time that all finished runs have. It counts
    each step with the median time of its phase's steps: without compilation, validation, saves and restarts."""
    paper: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """What the paper says of an arm, `arm: words`, for the page that `launch/results.py` makes."""


@dataclass(frozen=True)
class SelectionsConfig:
    seq_len_tokens: int = 0
    """Save what each trained indexer makes of this number of tokens of validation text in `selections.pt` of the run's
    folder, as `launch/export_indexer.py` does; 0 = do not."""
    layers: list[int] = field(default_factory=lambda: [0])
    """Layers whose indexers are saved, from 0."""
    runs: list[str] = field(default_factory=list)
    """Runs whose selections are saved, `<arm>-seed<N>`. Empty: all that have an indexer."""


@dataclass(frozen=True)
class StudyConfig:
    name: str = ""
    """Name of the study: letters, digits and _. Its folder is `<dir>/<name>`."""
    title: str = ""
    """Heading of the report. Empty: the name."""
    question: str = ""
    """What the study asks. `launch/results.py` makes pages of the studies that have one."""
    dir: str = "runs/studies"
    """Folder that holds the folders of studies."""
    config: str = ""
    """Base config: a file beside the study file, or what `launch/pretrain.py --config` takes."""
    seeds: list[int] = field(default_factory=lambda: [1])
    """Seeds: each arm is trained once with each, as `run.seed` (initial weights) and `data.seed` (order of the text).
    Arms with the same seed read the same text in the same order."""
    set: dict[str, str] = field(default_factory=dict, metadata={"any_names": True})
    """What all arms have otherwise than the base config; an arm's own `set` comes after it."""
    data_parallel: int = 1
    """Data-parallel ranks of each run. It takes as many devices times `parallel.tensor`, `context` and `pipeline`."""
    arms: list[ArmConfig] = field(default_factory=list)
    """The arms, in the order of the tables."""
    evaluations: list[EvaluationConfig] = field(default_factory=list)
    """What is evaluated after each run. Empty: nothing."""
    metrics: list[MetricConfig] = field(default_factory=list)
    """What is compared, in the order of the tables."""
    table: list[str] = field(default_factory=list)
    """Keys of the metrics that the page of results shows, each at its last point. Empty: all."""
    selections: SelectionsConfig = field(default_factory=SelectionsConfig)
    """Selections saved for the benches of kernels."""


AT_LEAST_ZERO = frozenset(
    ["arms.initial_step", "evaluations.max_tokens", "evaluations.task_examples", "selections.seq_len_tokens"]
)
"""Integers that may be 0; the others are at least 1."""
