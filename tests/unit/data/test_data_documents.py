from collections import Counter
from pathlib import Path

import pytest
from data_corpus import write_shard

from gsa_data.documents import Document, parse_line, read_documents
from gsa_data.faults import DataFault, Reading
from gsa_data.shards import build_manifest


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
        (b'{"text": "\xed\xa0\x80"}', "bad_utf8"),  # a lone surrogate
        (b'["text"]', "missing_text"),
        (b'{"content": "a"}', "missing_text"),
        (b'{"text": null}', "missing_text"),
        (b'{"text": 7}', "missing_text"),
        (b'{"text": ""}', "empty_text"),
        (b'{"text": " \\n\\t"}', "empty_text"),
        (b"", "empty_text"),
        (b"  \r", "empty_text"),
        (b'{"text": "a", "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_json"),
    ],
)
def test_parse_line(text: bytes, expected: Document | str) -> None:
    assert parse_line(text) == expected


def test_text_field_and_longest_document() -> None:
    assert parse_line(b'{"content": "a", "text": 1}', "content") == Document(b"a", "")
    assert parse_line('{"text": "éé"}'.encode(), max_document_bytes=4) == Document("éé".encode(), "")
    assert parse_line('{"text": "ééx"}'.encode(), max_document_bytes=4) == "huge_document"


def test_too_many_bad_lines_make_a_bad_shard(tmp_path: Path) -> None:
    """Empty text is not a bad line."""
    lines = [b'{"text": "good"}'] * 96 + [b'{"text"', b'{"text": "\xff"}', b"{}", b'{"text": ""}']
    write_shard(tmp_path / "s0.jsonl.zst", lines)
    manifest, counters = build_manifest(str(tmp_path)), Counter[str]()
    parsed = read_documents(manifest, "s0.jsonl.zst", Reading(max_bad_line_fraction=0.03), counters)
    assert parsed == [Document(b"good", "")] * 96 + ["bad_json", "bad_utf8", "missing_text", "empty_text"]
    assert counters == Counter(shards_read=1)
    counted = r"bad_json 1, bad_utf8 1, empty_text 1, missing_text 1; text_field=text; line 97: .* at char"
    message = (
        rf"s0\.jsonl\.zst has 3 bad lines of 100 \({counted}.*\), more than max_bad_line_fraction=0\.029"
    )
    with pytest.raises(DataFault, match=message):
        read_documents(manifest, "s0.jsonl.zst", Reading(max_bad_line_fraction=0.029), counters)
    counters.clear()
    skipping = Reading("skip", max_bad_line_fraction=0.029)
    assert read_documents(manifest, "s0.jsonl.zst", skipping, counters) == []
    assert counters == Counter(shards_read=1, shards_bad_lines=1)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_no_json_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    lines = [b'{"text": "good"}', b"", b'{"text": "good", "score": %s}' % value.encode()]
    write_shard(tmp_path / "s0.jsonl.zst", lines)
    message = rf"line 3: .* at character 2\d; {value.removeprefix('-')} is not JSON, write null"
    with pytest.raises(DataFault, match=message):
        read_documents(build_manifest(str(tmp_path)), "s0.jsonl.zst", Reading(), Counter())
