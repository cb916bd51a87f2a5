"""Build a dataclass from a YAML file and `key=value` arguments, and collect every mistake.

Scalars in the file and on the command line are read as text, and the type of the field decides what this text means.
For example, `off` means false for a bool field, but stays the word `off` for a field that has `off` among its choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ValidationError

from gsa_data.whole_files import read_whole
from gsa_train.config.other_names import FIELD_OF, REMOVED, WHY_REMOVED, any_value_loads, present_value
from gsa_train.config.text_yaml import TextLoader

Built = TypeVar("Built")


MOST_YAML_BYTES = 1 << 22
"""Limit for the size of a YAML file. PyYAML takes a minute to read a file of this size."""
MOST_DIGITS = 18
"""Limit for integers, because torch's seeds and sizes have 64 bits."""


class ConfigError(ValueError):
    """Lists every mistake of one config, a line each in `problems`."""

    def __init__(self, path: str | Path, problems: list[str]) -> None:
        self.problems = problems
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__("\n  ".join([f"{path}: {len(problems)} {noun}", *problems]))


class Problems:
    """Collects the mistakes in a config of class `root`, and the fields that they leave without a value."""

    def __init__(self, root: type, of_checkpoint: bool = False) -> None:
        """
        Args:
            of_checkpoint: whether the config is a checkpoint's, which nobody can change.
        """
        self.root, self.of_checkpoint = root, of_checkpoint
        self.lines: list[str] = []
        self._unusable: set[str] = set()

    def add(self, field: str, value: object, wrong: str, remedy: str, *, meant: Sequence[str] = ()) -> None:
        """Add a mistake. `meant` are the fields that the user may have meant by a misspelled one."""
        remedy = "use the version of gsa_train that saved it" if self.of_checkpoint else remedy
        self.lines.append(problem_line(field, value, wrong, remedy))
        self._unusable.update({field, *meant})

    def explain(self, line: str) -> bool:
        """Return True if an earlier mistake explains `line`, because it left the field in `line` without a value."""
        # A section is named as `model = ...` or inside `model.num_layers`; the bare word may be prose.
        endings = {field: r"(?!\w)" if "." in field else r"(?:\.\w| = )" for field in self._unusable}
        return any(re.search(rf"(?<![\w.]){re.escape(field)}{end}", line) for field, end in endings.items())


def problem_line(field: str, value: object, wrong: str, remedy: str) -> str:
    """Format `field = value: what is wrong; remedy`."""
    return f"{field} = {as_written(value)}: {wrong}; {remedy}"


def not_in(table: Mapping[str, object], field: str, name: str) -> list[str]:
    """Return a problem line if the table lacks the name that the field chooses, else an empty list."""
    if name in table:
        return []
    return [problem_line(field, name, "no such name", f"give one of {', '.join(table)}")]


def chosen(table: Mapping[str, Built], field: str, name: str) -> Built:
    """Return the row of the table that a field of a config chooses.

    Raises:
        ValueError: there is no such row.
    """
    for wrong in not_in(table, field, name):
        raise ValueError(wrong)
    return table[name]


def as_written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value and value == value.strip() and value.isprintable():
        return value
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flat_fields(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `section.field` and value of a config as a dict. A phase is named by its number."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flat_fields(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list) and any(isinstance(each, dict) for each in tree):
        for number, value in enumerate(tree):
            yield from flat_fields(value, f"{where}.{number}")
    else:
        yield where, tree


# ---- text -> tree of mappings, lists, text and None

SHIPPED = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
"""Folder of the project's configs: in an installation, in a checkout."""


def find_config(path: str | Path) -> Path:
    """Return the config's file. A bare name such as `demo` means the shipped config of that name, unless a file of this
    name exists."""
    bare = Path(path).name == str(path) and not Path(path).exists()
    named = [folder / f"{path}.yaml" for folder in SHIPPED if bare]
    return next((file for file in named if file.is_file()), Path(path))


def read_yaml(path: str | Path, kind: str = "config") -> dict[Any, Any]:
    """Read the tree of a YAML file, or of a shipped config by its name.

    Args:
        kind: `config`, or another kind of file, for which an error suggests no names of configs.

    Raises:
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    try:
        content = read_whole(find_config(path), MOST_YAML_BYTES)
    except ValueError as error:
        raise ConfigError(path, [str(error)]) from None
    except OSError as error:
        names = ", ".join(sorted({file.stem for folder in SHIPPED for file in folder.glob("*.yaml")}))
        wrong = f"cannot be read: {error.strerror} ({Path(path).absolute()})"
        remedy = f"a YAML file, or a name: {names}" if kind == "config" else f"a {kind} file"
        raise ConfigError(path, [f"{wrong}; give the path of {remedy}"]) from error
    return parse_yaml(content, path)


def parse_yaml(content: str | bytes, path: str | Path) -> dict[Any, Any]:
    """Read the tree of a YAML file's content.

    Raises:
        ConfigError: the content is not a YAML mapping.
    """
    try:
        tree = yaml.load(content, TextLoader)
    except yaml.YAMLError as error:
        raise ConfigError(path, [f"{_yaml_reason(error)}; correct the YAML there"]) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        found = "a list" if isinstance(tree, list) else "text"
        raise ConfigError(path, [f"holds {found}, not sections; write `section:` and its fields below it"])
    return tree


def _yaml_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def apply_override(tree: dict[Any, Any], override: str, problems: Problems) -> None:
    """Write one `section.field=value` or `phases.0.field=value` into the tree. `phases[0].field` means the same."""
    path, equals, text = override.partition("=")
    path = re.sub(r"\[(\d+)\]", r".\1", path.strip())
    if not equals or not path:
        remedy = "write for example train.micro_batch_size=2"
        problems.lines.append(f"{override}: not of the form key=value; {remedy}")
        return
    if not text.strip():
        problems.add(path, "", "no value after the =", f"write {path}=VALUE, for an empty text {path}=\"''\"")
        return
    try:
        value = yaml.load(text, TextLoader)
    except yaml.YAMLError as error:
        problems.add(path, text, f"not readable as YAML ({_yaml_reason(error)})", "put the value in quotes")
        return
    if isinstance(value, dict) and value:
        problems.add(path, text, "sets several fields at once", "write one key=value for each field")
        return
    # The shell removes the quotes of `run.name="trial #2"`, which would then be the run `trial`.
    if _has_comment(text):
        problems.add(path, text, "a comment from # on, as YAML reads it", "put the value in quotes")
        return

    keys = path.split(".")
    for depth in range(1, len(keys)):
        if _has_names(problems.root, keys[:depth]):
            keys[depth:] = [".".join(keys[depth:])]
            break
    node: Any = tree
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth])
        is_last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                known = ", ".join(map(str, range(len(node))))
                remedy = f"choose one of its items: {known}" if node else f"write the list: {where}=[...]"
                problems.add(path, text, f"{where} has no item {key}", remedy)
                return
            index: int | str = int(key)
        elif isinstance(node, dict):
            index = key
            if not is_last and node.get(key) is None:
                is_list = keys[depth + 1].isdecimal() and not _has_names(problems.root, keys[: depth + 1])
                node[key] = [] if is_list else {}
        else:
            problems.add(path, text, f"{where} is not a section", f"correct {where} first")
            return
        if is_last:
            node[index] = value
        node = node[index]


def _has_names(root: type, keys: Sequence[str]) -> bool:
    """Whether a field maps names to values. Names of sources may contain dots, or be digits alone."""
    hint: Any = root
    for key in keys:
        hint = _hints(hint).get(key) if _is_section(hint) else None
    return typing.get_origin(hint) is dict


def _has_comment(text: str) -> bool:
    """Whether YAML drops the text after the value."""
    node = yaml.compose(text, TextLoader)
    end = 0 if node is None else node.end_mark.index
    return text[end:].lstrip().startswith("#")


# ---- tree -> dataclass


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Returns a dict from fields to types. It is cached, because Python compiles each annotation again at every
    call."""
    return typing.get_type_hints(cls)


def build(cls: type[Built], tree: object, problems: Problems, where: str = "") -> Built:
    """Build the dataclass `cls` from a tree. A field with a mistake keeps its default."""
    hints = _hints(cls)  # type: ignore[arg-type]
    if not isinstance(tree, dict):
        wrong = "no fields below it" if tree is None else "not a section"
        of_list = re.search(r"\.\d+$", where)
        remedy = "set its fields" if of_list else "leave it out for its defaults, or set its fields"
        problems.add(where, tree, wrong, f"{remedy}: {', '.join(hints)}")
        return cls()
    values: dict[str, Any] = {}
    section_fields = {each.name: each for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in tree.items():
        field = f"{where}.{key}" if where else str(key)
        hint = hints.get(key)
        if field in REMOVED:
            loads = problems.of_checkpoint and any_value_loads(field)
            if not loads and as_written(value) not in map(as_written, REMOVED[field]):
                problems.add(field, value, WHY_REMOVED, "use that version, or remove the field")
        elif hint is None:
            _add_unknown(cls, str(key), value, where, problems)
        elif _is_section(hint):
            values[key] = build(hint, value, problems, field)
        elif typing.get_origin(hint) is dict:
            any_names = bool(section_fields[key].metadata.get("any_names"))
            values[key] = _build_dict(typing.get_args(hint)[1], value, problems, field, any_names)
        elif typing.get_origin(hint) is list:
            values[key] = _build_list(typing.get_args(hint)[0], value, problems, field)
        else:
            if isinstance(value, str):
                value = present_value(field, value, problems.of_checkpoint)
            try:
                values[key] = _typed(hint, value)
            except ValidationError:
                wrong = _wrong_in_words(value, hint)
                default = as_written(getattr(cls(), key))
                problems.add(field, value, wrong, f"write for example {field}={default}")
    return cls(**values)


@cache
def _converter(hint: Any) -> DictConfig:
    """Return a converter of values to this type. Views of whole dataclasses would be slow."""
    return DictConfig({}, key_type=str, element_type=hint)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _build_list(item_cls: type[Built], value: object, problems: Problems, field: str) -> list[Built]:
    if value is None:
        problems.add(field, value, "no value", f"write {field}=[] for none, or leave it out for its default")
        return []
    if _is_section(item_cls):
        if isinstance(value, list):
            return [build(item_cls, item, problems, f"{field}.{index}") for index, item in enumerate(value)]
        problems.add(field, value, "not a list", f"write one `- name: ...` below `{field}:` for each item")
        return []
    with contextlib.suppress(ValidationError):
        if isinstance(value, list):
            return [_typed(item_cls, item) for item in value]
    wrong = f"not a list where each item is {_type_in_words(item_cls)}"
    example = "[a, b]" if item_cls is str else "[1, 2]"
    problems.add(field, value, wrong, f"write for example '{field}={example}'")
    return []


PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""Names that may be part of a dotted field name and of a metric's name."""


def _build_dict(
    value_hint: Any, value: object, problems: Problems, field: str, any_names: bool
) -> dict[str, Any]:
    """Build a dict whose keys are names that the user chose, and whose values all have one type.

    An entry with a mistake is left out. If `any_names` is False, the names must match PLAIN_NAME.
    """
    if value is None:
        problems.add(field, value, "no value", f"write {field}={{}} for none, or {field}.NAME=VALUE for each")
        return {}
    if not isinstance(value, dict):
        problems.add(field, value, "not a value under a name", f"write {field}.NAME=VALUE for each")
        return {}
    entries: dict[str, Any] = {}
    for name, item in value.items():
        entry = f"{field}.{name}"
        if not isinstance(name, str) or not (any_names or PLAIN_NAME.fullmatch(name)):
            remedy = "use letters, digits and _, and begin with a letter"
            problems.add(entry, item, f"{as_written(name)} is not a plain name", remedy)
            continue
        try:
            entries[name] = _typed(value_hint, item)
        except ValidationError:
            if isinstance(item, dict) and item:
                remedy = f"write each with its whole name, such as {entry}.{next(iter(item))}"
                problems.add(entry, "{...}", "several fields at once", remedy)
                continue
            wrong = _wrong_in_words(item, value_hint)
            problems.add(entry, item, wrong, f"write {entry}=VALUE, or remove the name")
    return entries


def _typed(hint: Any, value: object) -> Any:
    """Convert the value of one field to the field's type by OmegaConf."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ValidationError("OmegaConf's interpolation is not part of these configs")
    if isinstance(value, str) and "\0" in value:
        raise ValidationError("the end of a name to the operating system")
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValidationError("not a scalar")
    if isinstance(value, str) and float in typing.get_args(hint):
        with contextlib.suppress(ValueError):  # not a number: the text alternative of Union[float, str]
            value = float(value)
    section = _converter(hint)
    OmegaConf.update(section, "value", value)
    built = section["value"]
    if hint is bool and _integer(value) not in (None, 0, 1):
        raise ValidationError("OmegaConf takes every number but 0 as true")
    if hint is int and abs(built) >= 10**MOST_DIGITS:
        raise ValidationError("too large")
    return built


def _integer(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None


def _wrong_in_words(value: object, hint: Any) -> str:
    if value is None:
        return "no value"
    if hint is int and _integer(value) is not None:
        return f"more than {MOST_DIGITS} digits"
    return f"not {_type_in_words(hint)}"


def _type_in_words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if typing.get_origin(hint) is Union:
        return " or ".join(_type_in_words(option) for option in typing.get_args(hint))
    return {int: "an integer", float: "a number", bool: "true or false", str: "plain text"}[hint]


def _add_unknown(cls: type, key: str, value: object, where: str, problems: Problems) -> None:
    prefix = f"{where}." if where else ""
    known = list(_hints(cls))
    shown = "{...}" if isinstance(value, dict | list) else value
    meant = _meant(known, key, value, prefix, problems.root)
    remedy = f"did you mean {' or '.join(meant)}?" if meant else "remove it."
    keys = f"{f'Keys of {where}' if where else 'Sections'}: {', '.join(known)}"
    problems.add(f"{prefix}{key}", shown, "unknown key", f"{remedy} {keys}", meant=meant)


def _meant(known: list[str], key: str, value: object, prefix: str, root: type) -> list[str]:
    """Return the fields that an unknown key of a section with these `known` fields may stand for."""
    here = FIELD_OF.get(key, "").split(".")[-1]
    close = [here] if here in known else difflib.get_close_matches(key, known, n=1)
    if close and (here in known or key not in FIELD_OF):
        return [f"{prefix}{close[0]}"]
    inner = value if isinstance(value, dict) and not prefix else {}  # if the section does not exist
    found = [field for name in inner for field in fields_named(str(name), root)] or fields_named(key, root)
    return found or [f"{prefix}{name}" for name in close]


def fields_named(key: str, root: type) -> list[str]:
    """Return the fields that a user may mean by `key`, as `section.field` of a config of class `root`.

    If another framework has a setting `key`, the result is our field for this setting. Otherwise, the result is all
    fields named `key`, in any section.
    """
    names = field_names(root)
    if FIELD_OF.get(key) in names:
        return [FIELD_OF[key]]
    return [name for name in names if name.split(".")[-1] == key]


def field_names(cls: type, prefix: str = "") -> list[str]:
    """Returns `section.field` for every field of nested dataclasses. A list of sections has the fields of item 0."""
    names = []
    for key, hint in _hints(cls).items():
        item: Any = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if _is_section(hint):
            names += field_names(hint, f"{prefix}{key}.")
        elif _is_section(item):
            names += field_names(item, f"{prefix}{key}.0.")
        else:
            names.append(f"{prefix}{key}")
    return names
