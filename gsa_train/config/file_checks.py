"""Check that the folders and files that a config names exist, in plain Python.

If the server of a file system is gone, a call to it never returns and cannot be interrupted. Each call therefore has a
thread, which is abandoned if it gets no answer, and ends with the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gsa_data.listing import FORMATS, OTHER_FORMATS
from gsa_data.request_files import first_request, is_request_file
from gsa_train.config.data import DataConfig
from gsa_train.config.load import problem_line
from gsa_train.config.sections import Config

DATA_FORMATS = FORMATS + OTHER_FORMATS
CHECKPOINT_METADATA = "metadata.json"
"""A checkpoint with this file is complete (gsa_train.checkpoint.files)."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, DOUBLED_WAITS = 0.5, 60.0, 7
"""Before a retry of a read: gsa_data.faults.Reading.waits_seconds."""

logger = logging.getLogger(__name__)


def check_files(config: Config) -> list[str]:
    """Check all files that a run reads before its first step."""
    return check_data(config.data) + check_initial_weights(config) + check_tasks(config)


def check_data(data: DataConfig) -> list[str]:
    """Return a problem for each needed local file that is missing, or whose file system does not answer within the read
    limit. An address with `://` is not checked here but by the module that reads it."""
    folders = {"data.train_dir": data.train_dir, **validation_fields(data)}
    return _answers([*_questions(_folder_problems, folders), *_tokenizer_questions(data)], data)


def has_local_tokenizer(data: DataConfig) -> bool:
    """Whether the tokenizer, and the chat template if one is named, are local files that exist."""
    local = "://" not in data.tokenizer and "://" not in data.chat_template
    return local and not _answers(_tokenizer_questions(data), data)


def _tokenizer_questions(data: DataConfig) -> list[_Question]:
    files = {"data.tokenizer": data.tokenizer, "data.chat_template": data.chat_template}
    return _questions(_file_problems, files)


def check_initial_weights(config: Config) -> list[str]:
    def ask(field: str, folder: str) -> list[str]:
        # A run with an own checkpoint needs no initial weights at a restart.
        own = Path(config.run.dir) / config.run.name / "checkpoints"
        if Path(folder).is_dir() or any(own.glob(f"step_*/{CHECKPOINT_METADATA}")):
            return []
        return [
            config.problem(field, _missing("folder", folder), "name a checkpoint or a run, or leave it out")
        ]

    field, folder = "checkpoint.initial_weights", config.checkpoint.initial_weights
    return _answers([_Question(ask, field, folder)] if folder else [], config.data)


def check_tasks(config: Config) -> list[str]:
    tasks = {f"evaluate.tasks.{number}": task for number, task in enumerate(config.evaluate.tasks)}
    return _answers([_Question(task_problems, *each) for each in tasks.items()], config.data)


def task_problems(field: str, task: str) -> list[str]:
    """Return the mistakes in a task file that the field names. A name of the harness is accepted unchecked."""
    try:
        if is_request_file(task):
            first_request(task)
        elif task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            remedy = "name a file, or a task of the harness"
            return [problem_line(field, task, _missing("file", task), remedy)]
    except ValueError as error:
        return [f"{field} = {error}"]
    return []


def validation_fields(data: DataConfig) -> dict[str, str]:
    """Return a dict from the fields that name validation sets to their folders."""
    if not data.validation_sets:
        return {"data.validation_dir": data.validation_dir}
    return {f"data.validation_sets.{name}": folder for name, folder in data.validation_sets.items()}


def trained_validation_fields(data: DataConfig) -> list[str]:
    """Return the fields of validation sets that are `data.train_dir` or below it."""
    train = Path(data.train_dir).resolve()
    places = {field: Path(folder).resolve() for field, folder in validation_fields(data).items()}
    return [field for field, place in places.items() if train in (place, *place.parents)]


def longest_read_seconds(data: DataConfig) -> float:
    """Return the time from the first try of a read to its last failure, as
    gsa_data.faults.Reading.longest_wait_seconds."""
    waits = [FIRST_WAIT_SECONDS * 2.0**n for n in range(min(data.read_retries, DOUBLED_WAITS))]
    longest = (data.read_retries - len(waits)) * LONGEST_WAIT_SECONDS
    return (data.read_retries + 1) * data.read_timeout_seconds + sum(waits) + longest


class _Question(threading.Thread):
    """Asks a file system, and holds the answer: lines of problems, or None while there is no answer."""

    def __init__(self, ask: Callable[[str, str], list[str]], field: str, path: str) -> None:
        super().__init__(name=f"check of {field}", daemon=True)
        self.field, self.path, self._ask = field, path, ask
        self.lines: list[str] | None = None

    def run(self) -> None:
        try:
            self.lines = self._ask(self.field, self.path)
        except OSError as error:
            wrong, remedy = f"cannot be read ({error})", "check path and access"
            self.lines = [problem_line(self.field, self.path, wrong, remedy)]


def _questions(ask: Callable[[str, str], list[str]], paths: dict[str, str]) -> list[_Question]:
    """Return a question for each field with a local path."""
    return [_Question(ask, *each) for each in paths.items() if each[1] and "://" not in each[1]]


def _answers(questions: list[_Question], data: DataConfig) -> list[str]:
    limits_seconds = data.read_timeout_seconds, longest_read_seconds(data)
    if not 0 < limits_seconds[0] <= limits_seconds[1] <= threading.TIMEOUT_MAX:
        return []  # limits come first and are reported elsewhere
    for question in questions:
        question.start()
    began = time.monotonic()
    for limit_seconds in limits_seconds:
        for question in questions:
            question.join(max(0.0, began + limit_seconds - time.monotonic()))
        silent = [question for question in questions if question.lines is None]
        for question in silent:
            seconds = time.monotonic() - began
            logger.warning("%s = %s: no answer for %.0f s", question.field, question.path, seconds)
    for question in silent:
        wrong = f"no answer for {limits_seconds[1]:g} s"
        remedy = "see that it is mounted and its server runs, or raise data.read_timeout_seconds"
        question.lines = [problem_line(question.field, question.path, wrong, remedy)]
    return [line for question in questions for line in question.lines or []]


def _folder_problems(field: str, folder: str) -> list[str]:
    if not Path(folder).is_dir():
        return [problem_line(field, folder, _missing("folder", folder), "create it, or set another")]
    endings = (*DATA_FORMATS, ".idx")
    files = (name for _, _, names in os.walk(folder, followlinks=True) for name in names)
    if not any(name.endswith(endings) for name in files):
        wrong = f"holds no *{', *'.join(DATA_FORMATS)}"
        return [problem_line(field, folder, wrong, "put shards there, or set another")]
    return []


def _file_problems(field: str, path: str) -> list[str]:
    if Path(path).is_file():
        return []
    remedy = "set a tokenizer file" if field == "data.tokenizer" else "set a Jinja file"
    return [problem_line(field, path, _missing("file", path), remedy)]


def _missing(what: str, path: str) -> str:
    """Return `no such folder`. For a relative path, add the folder in which it was looked for."""
    if left_to_a_shell(path):
        return f"no such {what}, for {LEFT_TO_A_SHELL}"
    return f"no such {what}" if Path(path).is_absolute() else f"not in the current folder {Path.cwd()}"


LEFT_TO_A_SHELL = "only a shell fills in ~ and $"


def left_to_a_shell(path: str) -> bool:
    """Return whether a path contains `~` or `$NAME`, which only a shell expands.

    A path in a YAML file never reaches a shell. On a command line, a shell does not expand `~` after `run.dir=`, nor
    `$NAME` in single quotes.
    """
    return path.startswith("~") or any(part.startswith("$") for part in Path(path).parts)
