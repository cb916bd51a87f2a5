"""Find tasks of lm-evaluation-harness by names or files, and encode their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gsa_data.tokenize import Tokenizer
from gsa_data.whole_files import MOST_LEVELS, read_whole
from gsa_train.config.load import MOST_YAML_BYTES

YAML = (".yaml", ".yml")
TASK_ERRORS = (
    AssertionError, AttributeError, ImportError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError,
    DatasetsError, TemplateError,
)  # fmt: skip
"""Errors, besides OSError, that the harness raises for a faulty task."""


@contextmanager
def task_errors(task: str, kinds: tuple[type[Exception], ...] = TASK_ERRORS) -> Iterator[None]:
    """
    Raises:
        ValueError: the harness cannot use the task. This error replaces the harness' own error.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError):
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise ValueError(
            f"{task}: lm-evaluation-harness cannot use it ({said}); correct the file, or name other tasks"
        ) from error


class NamingManager(TaskManager):  # type: ignore[misc]
    """Extends TaskManager so that its errors name tasks."""

    def load(self, task_list: Any) -> Any:
        given = [
            each.get("task", each.get("group")) if isinstance(each, dict) else each for each in task_list
        ]
        names = [each if isinstance(each, str) else "a task without a name" for each in given]
        with task_errors(", ".join(names)):
            return super().load(task_list)


def find_tasks(tasks: Sequence[str]) -> tuple[TaskManager, list[Any]]:
    """Returns the task manager of lm-evaluation-harness, and the tasks to load by it.

    Args:
        tasks: the harness' names of tasks, or the user's YAML files.

    Raises:
        ValueError: a task does not exist, its file is damaged, or a pattern matches all tasks.
    """
    # Searching the harness' own tasks is slow.
    manager = NamingManager(include_defaults=not all(task.endswith(YAML) for task in tasks))
    wanted: list[Any] = []
    for task in tasks:
        if task.endswith(YAML):
            if not Path(task).is_file():
                raise ValueError(f"{task}: no such file; give a YAML file of a task")
            try:
                _check_depth(task, read_whole(task, MOST_YAML_BYTES))
                with task_errors(task):
                    wanted.append(load_yaml(Path(task).absolute(), resolve_func=True))
            except yaml.YAMLError as error:
                place = getattr(error, "problem_mark", None)
                line = "" if place is None else f", line {place.line + 1}"
                wrong = getattr(error, "problem", None) or "cannot be read"
                raise ValueError(f"{task}{line}: not YAML ({wrong}); correct the file") from error
        elif matching := manager.match_tasks([task]):
            if len(matching) > 1 and len(matching) == len(manager.all_tasks):
                raise ValueError(
                    f"{task}: matches all {len(matching)} tasks of lm-evaluation-harness; name tasks or give a pattern "
                    "with a part of their names"
                )
            wanted += matching
        else:
            raise ValueError(f"{task}: lm-evaluation-harness has no such task; `lm_eval ls tasks` lists them")
    return manager, wanted


def _check_depth(task: str, content: bytes) -> None:
    """Refuse YAML that is nested too deeply for the harness' recursive loader."""
    levels = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if levels > MOST_LEVELS:
            raise ValueError(f"{task}: is nested more than {MOST_LEVELS} levels deep; correct the file")


class EncodingLM(TemplateLM):  # type: ignore[misc]
    """Encodes the requests of lm-evaluation-harness as training encodes text. An empty context becomes an EOS, because
    in training an EOS precedes each document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokens: list[int] = self._tokenizer.encode_prompt(string).tolist()
        return tokens

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [(each.args, *self._encode_pair(*each.args)) for each in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """
        Raises:
            ValueError: the continuation has no tokens, and would have the probability 1.
        """
        if context.strip():
            before, after = super()._encode_pair(context, continuation)
        else:  # Leading white space belongs to the continuation, as in the harness.
            before, after = [], self.tok_encode(context + continuation)
        if not before:
            # A text that begins with an EOS needs no further EOS.
            own = after[:1] == [self.eot_token_id] and len(after) > 1
            before, after = (after[:1], after[1:]) if own else ([self.eot_token_id], after)
        if not after:
            raise ValueError(
                f"the continuation {continuation!r} of {context[-20:]!r} has no separate tokens: the tokenizer "
                "joins the two, or has none for it; set the task's target_delimiter to a space"
            )
        return before, after
