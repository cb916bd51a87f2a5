"""Define tasks that a run scores between steps: their tokens, and the function from log-likelihoods to scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gsa_data.request_files import read_requests, score
from gsa_data.tokenize import Tokenizer
from gsa_train.validation.requests import Request, encode_requests


class TaskError(ValueError):
    """A task of `evaluate.tasks` cannot be scored in this run."""


@dataclass(frozen=True)
class PreparedTask:
    name: str
    requests: list[Request]
    scores: Callable[[Sequence[float]], dict[str, float]]
    """Maps the requests' log-likelihoods in nats to some of gsa_data.request_files.SCORES."""
    questions: int


def prepare_tasks(
    tasks: Sequence[str], tokenizer: Tokenizer, max_tokens: int, max_questions: int
) -> list[PreparedTask]:
    """
    Args:
        max_tokens: number of inputs of a sequence.
        max_questions: number of questions of each task; 0: all.

    Raises:
        TaskError: a task does not exist, its file is damaged, or it cannot be scored here.
    """
    found: dict[str, PreparedTask] = {}
    for number, task in enumerate(tasks):
        try:
            read = read_requests(task, max_questions or None)
            requests = encode_requests(read.requests, tokenizer, max_tokens, task)
            if read.name in found:
                raise ValueError(f"{task}: a task {read.name} exists already; rename its folder or file")
        except ValueError as error:
            raise TaskError(f"evaluate.tasks.{number} = {error}") from error
        except OSError as error:
            raise TaskError(f"evaluate.tasks.{number} = {task}: {error}") from error
        found[read.name] = PreparedTask(read.name, requests, partial(score, read), len(read.questions))
    return list(found.values())
