"""From the lines of a shard to its documents. Bad lines are counted and left out; too many stop the run."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import orjson

from gsa_data.shards import DataFault

BAD_LINES = ("bad_utf8", "bad_json", "missing_text")  # empty documents are harmless and do not count as bad


class Document(NamedTuple):
    text_utf8: bytes  # bytes, as one emoji in a Python string takes four bytes for every character of it
    source: str  # "" where the line names none


def parse_line(line: bytes) -> Document | str:
    """The document of one SlimPajama line, or the name of what is wrong with it.

    A line is {"text": ..., "meta": {"redpajama_set_name": ...}}. Faults: bad_utf8, bad_json, missing_text (no
    "text", or not a string) and empty_text (nothing but white space, also for a blank line).
    """
    if not line.strip():
        return "empty_text"
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "bad_json" if _is_utf8(line) else "bad_utf8"
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "missing_text"
    if not text.strip():
        return "empty_text"
    meta = record.get("meta")
    source = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return Document(text.encode(), source if isinstance(source, str) else "")


def parse_lines(lines: list[bytes], max_bad_line_fraction: float, shard: str) -> list[Document | str]:
    """Every line of one shard parsed, faults included, so that a line keeps its place.

    Raises DataFault when more than `max_bad_line_fraction` of the lines are bad.
    """
    parsed = [parse_line(line) for line in lines]
    faults = Counter(item for item in parsed if isinstance(item, str))
    bad = sum(faults[name] for name in BAD_LINES)
    if bad > max_bad_line_fraction * len(lines):
        found = ", ".join(f"{name} {faults[name]}" for name in BAD_LINES if faults[name])
        raise DataFault(
            f"shard {shard}: {bad} of {len(lines)} lines are bad ({found}), more than "
            f"max_bad_line_fraction={max_bad_line_fraction}; repair the shard or raise the limit"
        )
    return parsed


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
