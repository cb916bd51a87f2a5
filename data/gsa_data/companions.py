"""Read the files next to a tokenizer's file: the chat template, the special tokens, and generation_config.json.

The files have the same names as in transformers. The tokenizer and these files determine the tokens at which a model
stops generating.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gsa_data.chat_template import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatEncoder,
    ChatTemplate,
    beside,
    look_for_chat_template,
    read_object,
    special_tokens_of,
)
from gsa_data.faults import DEFAULT_READING, Reading
from gsa_data.tokenize import Tokenizer, TokenizerError

GENERATION_FILE = "generation_config.json"
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The fields of generation_config.json that are kept, in addition to `eos_token_id`"""


@dataclass(frozen=True)
class Companions:
    template: ChatTemplate | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """The special tokens in tokenizer_config.json, such as pad_token"""
    eos_ids: tuple[int, ...] = ()
    """The tokens in generation_config.json that end a text"""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of SAMPLING in generation_config.json"""

    def files(self) -> dict[str, bytes]:
        """Returns the files to write next to a copy of the tokenizer's file."""
        contents: dict[str, Any] = {}
        if self.special_tokens:
            contents[CONFIG_FILE] = dict(self.special_tokens)
        if self.eos_ids or self.sampling:
            contents[GENERATION_FILE] = {"eos_token_id": list(self.eos_ids), **self.sampling}
        found = {name: json.dumps(content, indent=2).encode() for name, content in contents.items()}
        if self.template is not None:
            found[TEMPLATE_FILE] = self.template.source.encode()
        return found


def read_companions(
    tokenizer_path: str, template: ChatTemplate | None = None, reading: Reading = DEFAULT_READING
) -> Companions:
    """Read the files next to the tokenizer's file.

    Args:
        template: a run's template, which replaces the template next to the tokenizer's file

    Raises:
        TokenizerError: a file is damaged
    """
    return Companions(
        template or look_for_chat_template(tokenizer_path, reading),
        special_tokens_of(read_object(beside(tokenizer_path, CONFIG_FILE), reading)),
        *_generation(beside(tokenizer_path, GENERATION_FILE), reading),
    )


def _generation(address: str, reading: Reading) -> tuple[tuple[int, ...], dict[str, Any]]:
    content = read_object(address, reading)
    named = content.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise TokenizerError(f"{address}: eos_token_id = {named!r}: give the id of a token, or a list of ids")
    sampling = {name: content[name] for name in SAMPLING if isinstance(content.get(name), int | float)}
    return tuple(ids), sampling


def set_up_tokenizer(tokenizer: Tokenizer, companions: Companions) -> None:
    """Set the tokens at which a model stops generating, and whether it is a chat model. Training, import and export all
    call this function, so they agree on these settings."""
    found = [tokenizer.eos_id, *companions.eos_ids]
    if companions.template is not None:
        turn_end = ChatEncoder(companions.template, tokenizer, trains=False).turn_end()
        found += [] if turn_end is None else [turn_end]
    tokenizer.stop_ids = tuple(dict.fromkeys(found))
    tokenizer.is_chat = companions.template is not None
