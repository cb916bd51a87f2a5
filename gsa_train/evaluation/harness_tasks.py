"""Tasks of lm-evaluation-harness: found by their names or files, and prepared for scoring between training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gsa_data.tokenize import Tokenizer
from gsa_data.whole_files import MOST_LEVELS, read_whole
from gsa_train.config.load import MOST_YAML_BYTES
from gsa_train.evaluation.loop_tasks import PreparedTask
from gsa_train.evaluation.requests import Request

YAML = (".yaml", ".yml")
METRICS = {"acc": "accuracy", "acc_norm": "length_normalised_accuracy"}
"""The harness' name -> ours; both normalise by characters."""
FEWSHOT_SEED = 1234
"""The harness' own default."""


def find_tasks(tasks: Sequence[str]) -> tuple[TaskManager, list[Any]]:
    """What `TaskManager.load` takes.

    Args:
        tasks: the harness' names, or YAML files of one's own.

    Raises:
        ValueError: there is no such task, or its file is damaged.
    """
    # To look for the harness' own tasks takes ten seconds.
    manager = TaskManager(include_defaults=not all(task.endswith(YAML) for task in tasks))
    wanted: list[Any] = []
    for task in tasks:
        if task.endswith(YAML):
            if not Path(task).is_file():
                raise ValueError(f"{task}: no such file; give a YAML file of a task")
            try:
                _check_depth(task, read_whole(task, MOST_YAML_BYTES))
                wanted.append(load_yaml(Path(task).absolute(), resolve_func=True))
            except yaml.YAMLError as error:
                place = getattr(error, "problem_mark", None)
                line = "" if place is None else f", line {place.line + 1}"
                wrong = getattr(error, "problem", None) or "cannot be read"
                raise ValueError(f"{task}{line}: is no YAML ({wrong}); mend the file") from error
        elif matching := manager.match_tasks([task]):
            wanted += matching
        else:
            raise ValueError(f"{task}: lm-evaluation-harness has no such task; `lm_eval ls tasks` lists them")
    return manager, wanted


def _check_depth(task: str, content: bytes) -> None:
    """By what the parser finds one after another: the harness' loader calls itself."""
    levels = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if levels > MOST_LEVELS:
            raise ValueError(f"{task}: is nested more than {MOST_LEVELS} levels deep; mend the file")


def prepare_harness_task(task: str, tokenizer: Tokenizer, max_tokens: int, limit: int | None) -> PreparedTask:
    """A task of multiple choices, or a group of such, over all its questions.

    Args:
        max_tokens: inputs of a forward pass.
        limit: questions of each task of a group, the first; None: all.

    Raises:
        ValueError: there is no such task, or it needs more than log-likelihoods.
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
            # Whether an answer is the greedy one, which no metric of METRICS reads, is not known.
            results = [(nats, False) for nats in log_likelihoods[first : first + count]]
            first += count
            for name, value in each.process_results(document, results).items():
                if name in METRICS:
                    values.setdefault(METRICS[name], []).append(float(value))
        return {name: sum(each) / len(each) for name, each in values.items()}

    requests = [encoder.request(*pair, max_tokens, task) for pair in encoder.encoded]
    name = Path(task).name.removesuffix(".yaml").removesuffix(".yml")
    return PreparedTask(name, requests, scores, len(questions))


class _Encoder(TemplateLM):  # type: ignore[misc]
    """Notes the tokens of requests as the harness makes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.encoded: list[tuple[list[int], list[int]]] = []

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(string).tolist()
        return tokens

    def request(self, context: list[int], continuation: list[int], max_tokens: int, where: str) -> Request:
        if not 0 < len(continuation) <= max_tokens:
            raise ValueError(
                f"{where}: a continuation has {len(continuation)} tokens; it needs at least 1, and the context length "
                f"{max_tokens} must hold it"
            )
        tokens = np.array([*context, *continuation][-max_tokens - 1 :], np.int32)
        return Request(tokens, min(len(continuation), len(tokens) - 1))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        self.encoded += [(context, continuation) for _, context, continuation in requests]
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError
