"""Find tasks of lm-evaluation-harness by names or files, and prepare them for scoring between training steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gsa_data.tokenize import Tokenizer
from gsa_data.whole_files import MOST_LEVELS, read_whole
from gsa_train.config.load import MOST_YAML_BYTES
from gsa_train.validation.loop_tasks import PreparedTask
from gsa_train.validation.requests import Request

YAML = (".yaml", ".yml")
METRICS = {"acc": "accuracy", "acc_norm": "length_normalised_accuracy"}
"""Maps the harness' names of scores to our names. `acc_norm` and our score both normalise by characters."""
FEWSHOT_SEED = 1234
"""The harness' default."""
TASK_ERRORS = (
    AssertionError, AttributeError, ImportError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError,
    DatasetsError, TemplateError,
)  # fmt: skip
"""Errors that the harness raises for a faulty task, in addition to OSError, whose message names a file."""


@contextmanager
def task_errors(task: str, kinds: tuple[type[Exception], ...] = TASK_ERRORS) -> Iterator[None]:
    """
    Raises:
        ValueError: instead of the harness' error for a task that it cannot use.
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
    """Returns the task manager, and the argument of its `load`.

    Args:
        tasks: the harness' names, or the user's YAML files.

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
    """Check the nesting by the parser's events, because the harness' loader is recursive."""
    levels = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if levels > MOST_LEVELS:
            raise ValueError(f"{task}: is nested more than {MOST_LEVELS} levels deep; correct the file")


def prepare_harness_task(task: str, tokenizer: Tokenizer, max_tokens: int, limit: int | None) -> PreparedTask:
    """Prepare a multiple-choice task, or a group of tasks, over all its questions.

    Args:
        max_tokens: number of inputs of a forward pass.
        limit: number of questions from each task of a group; None: all.

    Raises:
        ValueError: the task does not exist, or needs more than log-likelihoods.
    """
    manager, wanted = find_tasks([task])
    loaded = manager.load(wanted)["tasks"]
    encoder = _Encoder(tokenizer)
    questions: list[tuple[Any, Any, int]] = []  # task, document, its requests
    pairs: list[Any] = []
    for each in loaded.values():
        metrics = [name for name in METRICS if name in each.aggregation()]
        if each.OUTPUT_TYPE != "multiple_choice" or not metrics or callable(each.config.process_results):
            raise ValueError(
                f"{task}: {each.config.task} is of {each.OUTPUT_TYPE} with {', '.join(each.aggregation())}, and "
                "between training steps only multiple choices with acc or acc_norm are scored; give it to "
                "launch/evaluate.py"
            )
        each.set_fewshot_seed(seed=FEWSHOT_SEED)
        with task_errors(task):
            each.build_all_requests(limit=limit, rank=0, world_size=1)
        of_document: dict[int, list[Any]] = {}
        for instance in each.instances:
            of_document.setdefault(instance.doc_id, []).append(instance)
        for instances in of_document.values():
            ordered = sorted(instances, key=lambda instance: instance.idx)
            questions.append((each, ordered[0].doc, len(ordered)))
            pairs += ordered
    encoder.loglikelihood(pairs, disable_tqdm=True)

    def scores(log_likelihoods: Sequence[float]) -> dict[str, float]:
        values: dict[str, list[float]] = {}
        first = 0
        for each, document, count in questions:
            # No metric of METRICS needs to know whether an answer is the greedy one.
            results = [(nats, False) for nats in log_likelihoods[first : first + count]]
            first += count
            for name, value in each.process_results(document, results).items():
                if name in METRICS:
                    values.setdefault(METRICS[name], []).append(float(value))
        return {name: sum(each) / len(each) for name, each in values.items()}

    requests = [encoder.request(*pair, max_tokens, task) for pair in encoder.encoded]
    name = Path(task).name.removesuffix(".yaml").removesuffix(".yml")
    return PreparedTask(name, requests, scores, len(questions))


class EncodingLM(TemplateLM):  # type: ignore[misc]
    """Encodes the harness' requests in training's tokens. An EOS, which begins a document, replaces an empty
    context."""

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


class _Encoder(EncodingLM):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.encoded: list[tuple[list[int], list[int]]] = []

    def request(self, context: list[int], continuation: list[int], max_tokens: int, where: str) -> Request:
        if len(continuation) > max_tokens:
            raise ValueError(
                f"{where}: a continuation has {len(continuation)} tokens; the context length {max_tokens} must hold it"
            )
        return Request(np.array([*context, *continuation][-max_tokens - 1 :], np.int32), len(continuation))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        self.encoded += [(context, continuation) for _, context, continuation in requests]
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError
