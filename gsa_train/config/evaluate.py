"""`evaluate.*`: validation, and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gsa_data.request_files import is_request_file

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class EvaluateConfig:
    every_steps: int = 0
    """Steps between validations. 0: only at the end of the run."""
    max_blocks: int = 64
    """Number of sequences of each validation set that are scored."""
    split_by_source: bool = False
    """Also report a perplexity per source (`meta.redpajama_set_name`), for which the validation documents are scored
    again."""
    ngram_baselines: bool = False
    """At the end, score unigram and bigram models of the training tokens, which are read again. Only for small runs."""
    tasks: list[str] = field(default_factory=list)
    """Tasks to score during training, as request files (`olmo:hellaswag/rc_5shot`, a folder or `*.jsonl[.gz]`). Scores
    are `eval/...` in W&B and TensorBoard."""
    tasks_every_steps: int = 0
    """Steps between scorings of the tasks. 0: only at the end of the run."""
    tasks_max_questions: int = 0
    """Number of questions of each task, from its start. 0: all."""
    tasks_max_time_percent: float = 2.0
    """Limit for the time of scoring tasks, in percent of the time of training steps and tasks. A scoring that would
    exceed it is left out, and the log says so. 100: no limit."""


def check_tasks(config: Config) -> Iterator[str]:
    evaluate = config.evaluate
    for index, task in enumerate(evaluate.tasks):
        if not is_request_file(task):
            remedy = "give olmo:NAME, a folder or a *.jsonl[.gz] file; launch/evaluate.py scores other tasks"
            yield config.problem(f"evaluate.tasks.{index}", "no request file", remedy)
    if evaluate.tasks_every_steps > 0 and not evaluate.tasks:
        wrong, remedy = "there are no evaluate.tasks to score", "list some, or leave it out"
        yield config.problem("evaluate.tasks_every_steps", wrong, remedy)
    if not 0 < evaluate.tasks_max_time_percent <= 100:
        remedy = "give more than 0 and at most 100, which means no limit"
        yield config.problem("evaluate.tasks_max_time_percent", "no share of the time", remedy)
