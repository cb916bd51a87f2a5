"""Write the page of every config field, `docs/reference/config.md`, from the dataclasses.

    python -m gsa_study.commands.config_reference > docs/reference/config.md

Types and defaults come from the fields. The meaning of a field comes from the text below it, and its range from
`checks.py`. The command does not import torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from gsa_study import config as study
from gsa_train.config import Config
from gsa_train.config.checks import ABOVE_ZERO, AT_LEAST_ZERO, FROM_ZERO_BELOW_ONE, NOT_EMPTY

HEAD = """\
# Configuration reference

This page lists every field that a config file or `section.field=value` on the command line can set. `make docs` writes
it from the dataclasses in `gsa_train/config/`. [configuration.md](configuration.md) says how a config is read and
checked.
"""


STUDY_HEAD = """\
# Study files

A study file (`launch/study.py --study FILE`) can set these fields. The first table has the fields at the top level of
the file. Each later table has the fields of one section. [studies.md](../how_to/studies.md) says how to run a study.
"""


def page() -> str:
    """Return the whole page as Markdown: a chapter for each section of `Config`, a row for each field."""
    parts = [HEAD]
    for name, prefix, section in _sections(Config):
        texts = field_texts(section)
        parts.append(_chapter(section, prefix))
        parts += [
            _chapter(item, f"{name}.{inner}", texts[field]) for field, inner, item in _sections(section)
        ]
    parts += [STUDY_HEAD, _chapter(study.StudyConfig, "study")]
    for name, prefix, section in _sections(study.StudyConfig):
        parts.append(_chapter(section, prefix, SECTIONS_OF_A_STUDY[name]))
    return "\n".join(parts)


def _sections(config: type) -> Iterator[tuple[str, str, type]]:
    """For each config field that is a section or a list of sections, yields the field's name, its prefix on the command
    line, and the class of the section. The prefix of a list stands for every item: `phases.N`."""
    for name, hint in typing.get_type_hints(config).items():
        (item, *_) = typing.get_args(hint) or (hint,)
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            yield name, name if item is hint else f"{name}.N", item


SECTIONS_OF_A_STUDY = {
    "arms": "what is compared",
    "evaluations": "what is evaluated after each run",
    "metrics": "the columns of the tables",
}


def _chapter(section: type, prefix: str, meaning: str = "") -> str:
    """Return one section of the config. Sections inside it have their own chapters.

    Args:
        prefix: the text before a field on the command line.
        meaning: text of the chapter; empty: the docstring of the section's file.
    """
    module = sys.modules[section.__module__]
    meaning = meaning or inspect.cleandoc(str(module.__doc__)).partition(": ")[2]
    texts = field_texts(section)
    hints = typing.get_type_hints(section)
    lines = [
        f"## `{prefix}`: {meaning.rstrip('.')}\n",
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            continue
        cells = [
            f"`{field.name}`",
            _type_in_words(hint) + _range_in_words(f"{prefix.removesuffix('.N')}.{field.name}", hint),
            f"`{_default(field)}`",
            texts[field.name].replace("|", r"\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def field_texts(section: type) -> dict[str, str]:
    """Return a dict field name -> the text under it in the source, on one line.

    Raises:
        ValueError: a field has no text.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = after.value if isinstance(after, ast.Expr) else None
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            field = f"{section.__name__}.{node.target.id}"
            raise ValueError(f"{field}: no text below the field; say what it means")
        texts[node.target.id] = " ".join(text.value.split())
    return texts


def _type_in_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is Union:
        return " or ".join(map(_type_in_words, arguments))
    if dataclasses.is_dataclass(hint):
        return "section"
    if origin is list:
        return f"list of {_type_in_words(arguments[0])}s"
    if origin is dict:
        return f"{_type_in_words(arguments[1])}s by name"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[hint]


def _range_in_words(name: str, hint: Any) -> str:
    """Return the range that `checks.py` requires of this field alone. Checks between fields may require more."""
    if name in AT_LEAST_ZERO | study.AT_LEAST_ZERO:
        return ", 0 or more"
    if name in ABOVE_ZERO:
        return ", above 0"
    if name in FROM_ZERO_BELOW_ONE:
        return ", from 0 to below 1"
    if name in NOT_EMPTY:
        return ", not empty"
    return ", 1 or more" if hint is int else ""


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        return "below"
    return '""' if value == "" else str(value)


if __name__ == "__main__":
    print(page(), end="")
