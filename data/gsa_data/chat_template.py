"""Format conversations with a Jinja chat template, which transformers renders (the extra `hf`)."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gsa_data.cpu_limit import CpuLimit, OverLimit
from gsa_data.faults import Reading, warn_once
from gsa_data.fetch import read_bytes
from gsa_data.marks import mark
from gsa_data.tokenize import Part, Tokenizer, TokenizerError
from gsa_data.whole_files import MOST_BYTES, parse_json

if TYPE_CHECKING:  # pack imports torch, which a dry run does not need
    from gsa_data.pack import Tokens

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
"""Names in transformers of files next to the tokenizer's file"""

SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Variables of a template that transformers fills from the tokenizer's config"""

TOKEN_NAME = re.compile(r"<(?:\||\uff5c)[^<>\s'\"{}]+?(?:\||\uff5c)>")
"""Matches text that common templates use as one token, such as `<|im_start|>`, also with DeepSeek's wide bars."""

RENDER_ERRORS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError, MemoryError,
)  # fmt: skip
"""Errors, in addition to Jinja's errors, that a template may raise for an unexpected conversation"""
RENDER_SECONDS = 20.0
"""Limit of CPU time to render one conversation, which normally takes milliseconds"""

TRIAL = [
    {"role": "user", "content": "alpha"},
    {"role": "assistant", "content": "beta"},
    {"role": "user", "content": "gamma"},
    {"role": "assistant", "content": "delta"},
]
"""A conversation that every template must be able to format."""

Messages = Sequence[Mapping[str, Any]]


class TemplateRefused(ValueError):
    """The template cannot format this conversation. The message comes from the template."""


class TemplateFault(ValueError):
    """The template does not suit any conversation of this kind. The message says what to correct."""


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    """The Jinja text"""
    origin: str
    """The file of the template"""
    special_tokens: Mapping[str, str]
    """The special tokens in tokenizer_config.json"""

    def mentions(self, name: str) -> bool:
        """Whether the template uses the special token of this name, such as eos_token."""
        return re.search(rf"\b{name}\b", self.source) is not None

    @property
    def fingerprint(self) -> str:
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens in a tokenizer_config.json: bos_token, pad_token, ..."""
    named = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name in SPECIAL_TOKENS
    }
    return {name: value for name, value in named.items() if isinstance(value, str)}


def beside(tokenizer_path: str, name: str) -> str:
    """Returns the address of a file in the folder of the tokenizer's file."""
    return f"{tokenizer_path[: tokenizer_path.rfind('/') + 1]}{name}"


def find_chat_template(tokenizer_path: str, template_path: str, reading: Reading) -> ChatTemplate:
    """Returns the template in `template_path`, or the template next to the tokenizer's file if the path is empty.

    Raises TokenizerError if there is no template or several, or if a file cannot be read.
    """
    origin, found, special_tokens = _read_template(tokenizer_path, template_path, reading)
    if isinstance(found, list):
        names = ", ".join(str(each.get("name")) for each in found if isinstance(each, dict))
        raise TokenizerError(
            f"{origin} holds several chat templates ({names}); write the one to use into a file, and name it as "
            "chat_template"
        )
    if not isinstance(found, str):
        raise TokenizerError(
            f"tokenizer {tokenizer_path!r} has no chat template beside it ({TEMPLATE_FILE}, or chat_template in "
            f"{CONFIG_FILE}); name a Jinja file as chat_template"
        )
    return ChatTemplate(found, origin, special_tokens)


def look_for_chat_template(tokenizer_path: str, reading: Reading) -> ChatTemplate | None:
    """Returns the template next to the tokenizer's file, or None. With several, takes the one named `default`."""
    origin, found, special_tokens = _read_template(tokenizer_path, "", reading)
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return ChatTemplate(found, origin, special_tokens) if isinstance(found, str) else None


def _read_template(
    tokenizer_path: str, template_path: str, reading: Reading
) -> tuple[str, Any, dict[str, str]]:
    """Returns the template's file, its content (text, or a list of several), and the tokenizer's special tokens."""
    config_file = beside(tokenizer_path, CONFIG_FILE)
    config = read_object(config_file, reading)
    special_tokens = special_tokens_of(config)
    origin = template_path or beside(tokenizer_path, TEMPLATE_FILE)
    found: Any = _read_text(origin, reading)
    if found is None and template_path:
        raise TokenizerError(f"chat template {template_path!r} does not exist; give a Jinja file")
    if found is None:
        origin, found = config_file, config.get("chat_template")
    return origin, found, special_tokens


class ChatEncoder:
    """Encodes conversations to tokens with marks. Data workers can receive the encoder by pickle.

    The encoder marks the assistant's text for the loss. If the template puts this text into `{% generation %}` blocks,
    the encoder reads these blocks. Otherwise, it formats the messages with and without each answer, and takes the
    difference between the two results.

    Raises TokenizerError if the template does not fit this tokenizer, or transformers is not installed.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, trains: bool = True) -> None:
        """
        Args:
            trains: check that the template shows the assistant's tokens, which training needs and prompts do not
        """
        self.template, self.tokenizer = template, tokenizer
        self.variables = {**tokenizer.special_tokens, **template.special_tokens}
        """Name -> text of the special tokens that the template may use"""
        self._limit = CpuLimit()
        self._has_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", template.source) is not None
        if trains:
            self._check()

    def turn_end(self) -> int | None:
        """Returns the special token after the assistant's text, at which a trained model stops. Returns None if the
        template has no such token, or cannot format a conversation of user and assistant.
        """
        answer = TRIAL[-1]["content"]
        try:
            text = self.render_text(TRIAL)
        except TemplateRefused:
            return None
        return self.tokenizer.symbol_in(text.rpartition(answer)[2]) if answer in text else None

    def encode(self, messages: Messages, tools: Sequence[Any] | None) -> tuple[Tokens, int]:
        """Encode a conversation, and return marked tokens (marks.py) and the number of text bytes.

        The conversation ends with an EOS. If its last message is the assistant's, the loss covers this EOS, because a
        model stops at EOS (Tokenizer.stop_ids) and must learn to write it.

        Raises:
            TemplateRefused: the template cannot format the conversation
            TemplateFault: the template has no generation blocks and formats a message differently if more messages
                follow, or formatting takes longer than RENDER_SECONDS
        """
        text, parts = self.render(messages, tools)
        tokens, is_scored = self.tokenizer.encode_chat(text, parts)
        eos_id = self.tokenizer.eos_id
        if len(tokens) == 0 or tokens[-1] != eos_id:
            is_answer = messages[-1]["role"] == "assistant" and bool(is_scored.any())
            tokens, is_scored = np.append(tokens, np.int32(eos_id)), np.append(is_scored, is_answer)
        return mark(tokens, is_scored, eos_id), len(text.encode())

    def render_text(self, messages: Messages) -> str:
        """Returns the formatted text. Raises TemplateRefused if the template cannot format the messages."""
        return self._render(messages, None)[0]

    def render(self, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[Part]]:
        """Returns a conversation's text, and start and end of each of the assistant's parts."""
        if self._has_blocks:
            return self._render(messages, tools, tracks=True)
        text = self._render(messages, tools)[0]
        parts = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], tools, prompts=True)[0]
            through = self._render(messages[: place + 1], tools)[0]
            if not (through.startswith(before) and text.startswith(through)):
                raise TemplateFault(
                    f"chat template {self.template.origin} writes message {place + 1} or those before it otherwise "
                    "when more follow, so that the assistant's tokens cannot be told from the others; put "
                    "{% generation %} and {% endgeneration %} around them in the template"
                )
            parts.append((len(before), len(through)))
        return text, parts

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        prompts: bool = False,
        tracks: bool = False,
    ) -> tuple[str, list[Part]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(**given: Any) -> Any:  # transformers says that it returns a str
            with self._limit.within(RENDER_SECONDS):
                return render_jinja_template(**given)

        try:
            texts, parts = render(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.template.source,
                return_assistant_tokens_mask=tracks,
                add_generation_prompt=prompts,
                **self.variables,
            )
        except OverLimit as limit:
            raise TemplateFault(
                f"chat template {self.template.origin} did not write a conversation of {len(messages)} messages within "
                f"{RENDER_SECONDS:g} s of CPU time; correct its loops, or name another one as chat_template"
            ) from limit
        except (TemplateError, *RENDER_ERRORS) as error:
            raise TemplateRefused(" ".join(str(error).split()) or type(error).__name__) from error
        return texts[0], parts[0] if tracks else []

    def _check(self) -> None:
        template, tokenizer = self.template, self.tokenizer
        unknown = [name for name in SPECIAL_TOKENS if template.mentions(name) and name not in self.variables]
        if unknown:
            raise TokenizerError(
                f"chat template {template.origin} uses {', '.join(unknown)}, which tokenizer {tokenizer.path!r} does "
                f"not name; add it to {CONFIG_FILE} beside the tokenizer, or write the token into the template"
            )
        try:
            text, parts = self.render(TRIAL, None)
        except ImportError as error:
            raise TokenizerError(
                f"chat template {template.origin} needs the package transformers ({error}); run in the checkout: "
                "pip install '.[hf]'"
            ) from error
        except TemplateRefused as error:
            raise TokenizerError(
                f"chat template {template.origin} cannot write a conversation of user and assistant ({error}); correct "
                "it, or name another one as chat_template"
            ) from error
        except TemplateFault as error:
            raise TokenizerError(str(error)) from error
        if re.search(r"\bstrftime_now\s*\(", template.source):
            raise TokenizerError(
                f"chat template {template.origin} writes the day of the run (strftime_now), so that a resume would "
                "read other text; write a date into a copy of it, and name that as chat_template"
            )
        names = {*TOKEN_NAME.findall(template.source), *TOKEN_NAME.findall(text)}
        names |= {value for value in self.variables.values() if value in text}
        missing = sorted(name for name in names if not tokenizer.has_token(name))
        if missing:
            raise TokenizerError(
                f"chat template {template.origin} writes {', '.join(map(repr, missing))}, which tokenizer "
                f"{tokenizer.path!r} does not have as tokens; use a tokenizer that has them, or name a template of "
                "those that it has as chat_template"
            )
        self._check_parts(text, parts)

    def _check_parts(self, text: str, parts: Sequence[Part]) -> None:
        origin = self.template.origin
        answers = [message["content"] for message in TRIAL if message["role"] == "assistant"]
        written = [text[start:end] for start, end in parts]
        if not all(any(answer in part for part in written) for answer in answers):
            raise TokenizerError(
                f"chat template {origin}: its {{% generation %}} blocks do not hold all that the assistant says; put "
                "them around each of its messages, with the token that ends its turn"
            )
        if any(part.rstrip().endswith(answer) for part in written for answer in answers):
            warn_once(
                f"chat template {origin}: the assistant's part ends before a token that ends its turn, so the model "
                "does not learn to stop; put that token into the {% generation %} block, or at the end of its messages"
            )


def _read_text(address: str, reading: Reading) -> str | None:
    try:
        return read_bytes(address, reading, Counter(), MOST_BYTES).decode()
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{address} cannot be read ({error}); check address and access") from error


def read_object(address: str, reading: Reading) -> dict[str, Any]:
    """Read the object of a JSON file. A missing file gives an empty object."""
    text = _read_text(address, reading)
    try:
        content = parse_json(text) if text is not None else {}
    except ValueError as error:
        raise TokenizerError(f"{address} is not JSON ({error}); restore it") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{address} holds no object; restore it")
    return content
