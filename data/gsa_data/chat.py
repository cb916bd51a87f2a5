"""Read conversations as training data. A line holds `messages`, and the loss covers the assistant's tokens.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}

A conversation is one document. Each token is an integer whose lower bits are the token id. A higher bit says whether
the loss covers the token (marks.py). The loss mask therefore stays with the tokens during packing and the broadcast to
the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from gsa_data.chat_template import ChatEncoder, ChatTemplate, TemplateFault, TemplateRefused
from gsa_data.documents import Document, check_bad_lines, is_utf8
from gsa_data.faults import DataFault, Reading, warn_once
from gsa_data.marks import UNSCORED
from gsa_data.parquet import chat_rows
from gsa_data.reader import EncodedDocument, ShardLines, TextLines
from gsa_data.shards import Manifest, check_damage, read_lines, read_shard
from gsa_data.source_weights import NO_SOURCE
from gsa_data.tokenize import Tokenizer

FIELD = "messages"
ROLES = ("system", "developer", "user", "assistant", "tool")
CHAT_VERSION = 2
"""Raise this number if you change the tokens or marks of a conversation, because saved positions then no longer fit."""
NAMED_LINES = 5
"""The log names this number of faulty lines per shard, and counts the others."""


class WrongLine(NamedTuple):
    fault: str
    """The fault's name in the counters"""
    reason: str


@dataclass(frozen=True)
class ChatFolder:
    """Holds the shards of conversations, and the chat template that formats them."""

    manifest: Manifest
    template: ChatTemplate

    @property
    def root(self) -> str:
        return self.manifest.root


class ChatReader:
    """Formats conversations with a chat template and tokenizes them while reading.

    Raises TokenizerError if the template does not fit the tokenizer.
    """

    def __init__(self, folder: ChatFolder, tokenizer: Tokenizer, reading: Reading) -> None:
        self.manifest = folder.manifest
        self.encoder = ChatEncoder(folder.template, tokenizer)
        self.reading = reading

    def open(self, relpath: str, part: int, parts: int, counters: Counter[str]) -> ShardLines:
        lines = read_conversations(self.manifest, relpath, self.reading, counters)
        address = f"{self.manifest.root.rstrip('/')}/{relpath}"
        return _ChatLines(lines[part::parts], self.encoder, address, range(part, len(lines), parts))


class _ChatLines(TextLines):
    def __init__(
        self, lines: list[Document | str], encoder: ChatEncoder, address: str, places: range
    ) -> None:
        super().__init__(lines, encoder.tokenizer)
        self._encoder, self._address, self._places = encoder, address, places

    def __getitem__(self, place: int, /) -> EncodedDocument | str:
        line = self._lines[place]
        if isinstance(line, str):
            return line
        record = orjson.loads(line.text_utf8)
        where = f"{self._address}, line {self._places[place] + 1}"
        try:
            tokens, text_bytes = self._encoder.encode(record[FIELD], record["tools"])
        except TemplateRefused as error:
            warn_once(
                f"{where}: left out, as chat template {self._encoder.template.origin} refuses it ({error})"
            )
            return "template_refused"
        except TemplateFault as error:
            raise DataFault(f"{where}: {error}") from error
        if ((tokens & UNSCORED) != 0).all():
            warn_once(f"{where}: left out, as the template marks nothing of it as the assistant's")
            return "no_assistant"
        return EncodedDocument(tokens, text_bytes, line.source or NO_SOURCE)


def read_conversations(
    manifest: Manifest, relpath: str, reading: Reading, counters: Counter[str]
) -> list[Document | str]:
    """Returns a Document for each good line (JSON) or row (Parquet) of a shard, and the name of the fault for each bad
    one. A Document's text is a JSON object with `messages` and `tools`."""
    limit = reading.max_document_bytes
    parsed: list[Document | WrongLine]
    if relpath.endswith(".parquet"):
        packed = read_shard(manifest, relpath, reading, counters)
        if packed is None:
            return []
        rows, trouble = chat_rows(packed, relpath)
        check_damage(manifest, relpath, len(packed), trouble, reading, counters)
        parsed = [
            WrongLine("bad_utf8", "as it is not UTF-8") if row is None else parse_conversation(row, limit)
            for row in rows
        ]
    else:
        parsed = [parse_chat_line(line, limit) for line in read_lines(manifest, relpath, reading, counters)]
    wrong = [(number, line) for number, line in enumerate(parsed, 1) if isinstance(line, WrongLine)]
    for number, line in wrong[:NAMED_LINES]:
        warn_once(f"{manifest.root.rstrip('/')}/{relpath}, line {number}: left out, {line.reason}")
    lines = [line.fault if isinstance(line, WrongLine) else line for line in parsed]
    faults = Counter(line.fault for _, line in wrong)
    return lines if check_bad_lines(manifest, relpath, faults, len(lines), reading, counters) else []


def parse_chat_line(line: bytes, max_document_bytes: int = 1 << 25) -> Document | WrongLine:
    """Returns the conversation of one line of JSON, or the line's fault.

    Faults are the faults of `parse_conversation`, empty_text (a blank line), bad_utf8 and bad_json.
    """
    if not line.strip():
        return WrongLine("empty_text", "as it is blank")
    try:
        return parse_conversation(orjson.loads(line), max_document_bytes)
    except orjson.JSONDecodeError as error:
        return WrongLine("bad_json" if is_utf8(line) else "bad_utf8", f"as it is not JSON ({error})")


def parse_conversation(record: Any, max_document_bytes: int = 1 << 25) -> Document | WrongLine:
    """Returns the conversation in one JSON object or Parquet row, or the name of its fault. Null fields of messages are
    dropped.

    missing_messages: there is no `messages` list, or the list is empty
    bad_message: a message is not an object, a role is unknown, content is not text, `tools` is not a list of objects,
        or fields are nested more than 250 levels deep
    empty_text: a message has no content, and is not an assistant message with tool calls
    no_assistant: no message is from the assistant
    huge_document: the JSON is longer than max_document_bytes
    """
    if not isinstance(record, Mapping):
        return WrongLine("missing_messages", "as it is not an object with the field messages")
    messages, tools = record.get(FIELD), record.get("tools")
    if not isinstance(messages, list) or not messages:
        return WrongLine("missing_messages", "as it has no list of messages in the field messages")
    for number, message in enumerate(messages, 1):
        wrong = _wrong_message(message)
        if wrong is not None:
            return WrongLine(wrong.fault, f"as message {number} {wrong.reason}")
    if not any(message["role"] == "assistant" for message in messages):
        return WrongLine("no_assistant", "as no message is the assistant's")
    if isinstance(tools, str):  # tables hold JSON, because a column has one type
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            return WrongLine("bad_message", f"as its tools are not JSON ({error})")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return WrongLine("bad_message", "as its tools are not a list of objects")
    kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        text_utf8 = orjson.dumps({FIELD: kept, "tools": tools or None}, default=str)
    except orjson.JSONEncodeError as error:  # fields nested more than 250 deep
        return WrongLine("bad_message", f"as it cannot be written as JSON ({error})")
    if len(text_utf8) > max_document_bytes:
        return WrongLine("huge_document", f"as it has {len(text_utf8)} bytes, over {max_document_bytes}")
    meta = record.get("meta")
    source = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return Document(text_utf8, source if isinstance(source, str) else "")


def _wrong_message(message: Any) -> WrongLine | None:
    if not isinstance(message, dict):
        return WrongLine("bad_message", "is not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return WrongLine("bad_message", f"has role {role!r}, none of {', '.join(ROLES)}")
    if content is not None and not isinstance(content, str):
        return WrongLine("bad_message", f"has content that is not text, but {type(content).__name__}")
    if not (content or "").strip() and not (role == "assistant" and message.get("tool_calls")):
        return WrongLine("empty_text", "has no content")
    return None
