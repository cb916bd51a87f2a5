"""Read YAML as in configs: plain scalars are text."""

from __future__ import annotations

import re
from typing import Any

import yaml

from gsa_data.whole_files import MOST_LEVELS

_TAG = "tag:yaml.org,2002:"
_NULL_RESOLVER = [(f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"))]
_KNOWN_TAGS = (f"{_TAG}null", f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)  # None: any other is an error


class TextLoader(yaml.SafeLoader):
    """Loads YAML whose plain scalars are text, except null. Duplicate keys, aliases and other tags are errors."""

    yaml_implicit_resolvers = dict.fromkeys(("~", "n", "N", ""), _NULL_RESOLVER)
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _KNOWN_TAGS}  # noqa: RUF012

    _levels = 0  # depth of the node that is being read

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                problem="aliases (*name) are not part of these configs",
                problem_mark=self.peek_event().start_mark,
            )
        self._levels += 1
        if self._levels > MOST_LEVELS:  # PyYAML's own functions are recursive
            raise yaml.composer.ComposerError(
                problem=f"sections and lists are nested more than {MOST_LEVELS} levels deep",
                problem_mark=self.peek_event().start_mark,
            )
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key} is already set in line {seen[key]}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep)
