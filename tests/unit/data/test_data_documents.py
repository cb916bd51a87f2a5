from __future__ import annotations

import pytest

from gsa_data import DataFault
from gsa_data.documents import Document, parse_line, parse_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"text": "a\\u00e9", "meta": {"redpajama_set_name": "X"}}', Document("aé".encode(), "X")),
        (b'{"text": "a"}', Document(b"a", "")),
        (b'{"text": "a", "meta": null}', Document(b"a", "")),
        (b'{"text": "a", "meta": {"redpajama_set_name": 3}}', Document(b"a", "")),
        (b'{"text": "a", "meta"', "bad_json"),
        (b'{"text": "lone \\ud800 surrogate"}', "bad_json"),
        (b'{"text": "\xff\xfe"}', "bad_utf8"),
        (b'["text"]', "missing_text"),
        (b'{"content": "a"}', "missing_text"),
        (b'{"text": null}', "missing_text"),
        (b'{"text": 7}', "missing_text"),
        (b'{"text": ""}', "empty_text"),
        (b'{"text": " \\n\\t"}', "empty_text"),
        (b"", "empty_text"),
        (b"  \r", "empty_text"),
    ],
)
def test_parse_line(text: bytes, expected: Document | str) -> None:
    assert parse_line(text) == expected


def test_too_many_bad_lines_stop_the_run() -> None:
    lines = [b'{"text": "good"}'] * 97 + [b'{"text"', b'{"text": "\xff"}', b"{}"]
    parsed = parse_lines(lines, 0.03, "s0")
    assert parsed == [Document(b"good", "")] * 97 + ["bad_json", "bad_utf8", "missing_text"]
    with pytest.raises(
        DataFault, match=r"s0: 3 of 100 lines are bad \(bad_utf8 1, bad_json 1, missing_text 1\)"
    ):
        parse_lines(lines, 0.02, "s0")
    assert parse_lines([b'{"text": ""}'] * 3, 0.0, "s0") == ["empty_text"] * 3  # harmless
