"""Read the documents of a shard. Bad lines are counted and skipped. If a shard has too many bad lines, the whole shard
counts as bad."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import orjson

from gsa_data.faults import BAD_LINES, Reading, warn_once
from gsa_data.parquet import parquet_rows
from gsa_data.shards import Manifest, check_damage, read_lines, read_shard, refuse

NO_JSON = re.compile(r"NaN|Infinity")
"""Invalid JSON that Python's json accepts"""


class Document(NamedTuple):
    text_utf8: bytes  # in a str one emoji makes every character take four bytes
    source: str  # "" if the line names no source


def read_documents(
    manifest: Manifest, relpath: str, reading: Reading, counters: Counter[str]
) -> list[Document | str]:
    """Returns a Document for each good line or row of a shard, and the name of the fault for each bad one.

    If a shard has more bad lines than `reading` allows, returns [] with on_bad_shard="skip", else raises DataFault.
    """
    limit, lines = reading.max_document_bytes, []
    if relpath.endswith(".parquet"):
        packed = read_shard(manifest, relpath, reading, counters)
        if packed is None:
            return []
        rows, trouble = parquet_rows(packed, manifest.text_field, relpath)
        check_damage(manifest, relpath, len(packed), trouble, reading, counters)
        parsed = [parse_row(text, source, limit) for text, source in rows]
    else:
        lines = read_lines(manifest, relpath, reading, counters)
        parsed = [parse_line(line, manifest.text_field, limit) for line in lines]

    faults = Counter(item for item in parsed if isinstance(item, str))
    first = first_bad_json(lines) if faults["bad_json"] else ""
    return parsed if check_bad_lines(manifest, relpath, faults, len(parsed), reading, counters, first) else []


def first_bad_json(lines: list[bytes]) -> str:
    """Returns the number of the first line that is not JSON, and the error."""
    for number, line in enumerate(lines, start=1):
        try:
            orjson.loads(line or b"0")
        except orjson.JSONDecodeError as error:
            if is_utf8(line):
                found = NO_JSON.match(line.decode(), error.pos)
                remedy = f"; {found[0]} is not JSON, write null" if found else ""
                return f"; line {number}: {error.msg} at character {error.pos + 1}{remedy}"
    return ""


def check_bad_lines(
    manifest: Manifest,
    relpath: str,
    faults: Counter[str],
    num_lines: int,
    reading: Reading,
    counters: Counter[str],
    first: str = "",
) -> bool:
    """Returns whether a shard with these faults may be used. Raises DataFault for a bad shard that is not skipped.

    Args:
        first: place and cause of the first fault, for the message
    """
    if not faults:
        return True
    address = f"{manifest.root.rstrip('/')}/{relpath}"
    found = ", ".join(f"{name} {count}" for name, count in sorted(faults.items()))
    bad = sum(faults[name] for name in BAD_LINES)
    if bad > reading.max_bad_line_fraction * num_lines:
        field = "" if manifest.is_chat else f"; text_field={manifest.text_field}"
        trouble = (
            f"has {bad} bad lines of {num_lines} ({found}{field}{first}), more than "
            f"max_bad_line_fraction={reading.max_bad_line_fraction} allows"
        )
        refuse(address, trouble, "shards_bad_lines", reading, counters)
        return False
    warn_once(f"shard {address}: {faults.total()} of {num_lines} lines are left out ({found}{first})")
    return True


def parse_line(line: bytes, text_field: str = "text", max_document_bytes: int = 1 << 25) -> Document | str:
    """Returns the document of one line of JSON, or the name of its fault.

    A line is {"text": ..., "meta": {"redpajama_set_name": ...}}, as in SlimPajama. "meta" is optional. The faults are:

    bad_utf8, bad_json: the line is not valid UTF-8 or JSON, or has a lone surrogate
    missing_text: "text" is missing, null or not a string
    empty_text: the line or its text is only white space
    huge_document: the text has more than max_document_bytes in UTF-8
    """
    if not line.strip():
        return "empty_text"
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "bad_json" if is_utf8(line) else "bad_utf8"
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "missing_text"
    if not text.strip():
        return "empty_text"
    text_utf8 = text.encode()
    if len(text_utf8) > max_document_bytes:
        return "huge_document"
    meta = record.get("meta")
    source = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return Document(text_utf8, source if isinstance(source, str) else "")


def parse_row(text: bytes | None, source: bytes | None, max_document_bytes: int = 1 << 25) -> Document | str:
    """Returns the document of one row of Parquet, or the name of its fault (see `parse_line`)."""
    if text is None:
        return "missing_text"
    if not is_utf8(text):
        return "bad_utf8"
    if not text.decode().strip():
        return "empty_text"
    if len(text) > max_document_bytes:
        return "huge_document"
    return Document(text, source.decode(errors="replace") if source else "")


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
