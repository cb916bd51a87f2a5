"""Tests shards in Parquet, and in JSON lines that are plain or compressed by gzip or zstd. A folder, which may be at
any fsspec address, may mix these formats."""

import gzip
import io
import json
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from data_corpus import document, line, read_run, write_shard

from gsa_data import unpack
from gsa_data.documents import Document, read_documents
from gsa_data.faults import DataFault, Reading
from gsa_data.parquet import SOURCE_COLUMN, parquet_rows
from gsa_data.shards import FORMATS, Manifest, build_manifest
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NUMBERS = range(30)


def packed_lines(field: str = "text") -> bytes:
    return b"".join(json.dumps({field: document(number)}).encode() + b"\n" for number in NUMBERS)


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **{"row_group_size": 10, **options})
    return buffer.getvalue()


def packed_in(form: str, field: str = "text") -> bytes:
    lines = packed_lines(field)
    return {
        ".jsonl": lines,
        ".jsonl.zst": zstandard.compress(lines),
        ".jsonl.gz": gzip.compress(lines[:500])
        + gzip.compress(lines[500:])
        + bytes(512),  # members and padding
        ".parquet": parquet({field: [document(number) for number in NUMBERS]}),
    }[form]


def documents_of(manifest: Manifest, relpath: str, **reading: Any) -> list[Document | str]:
    return read_documents(manifest, relpath, Reading(**reading), Counter())


def test_c4_as_published_counts_where_there_are_no_other_shards(tmp_path: Path) -> None:
    name = "c4-train.00000-of-01024.json.gz"
    (tmp_path / name).write_bytes(gzip.compress(packed_lines()))
    manifest = build_manifest(str(tmp_path))
    assert manifest.shards == ((name, (tmp_path / name).stat().st_size),)
    assert documents_of(manifest, name) == [Document(document(n).encode(), "") for n in NUMBERS]
    write_shard(tmp_path / "s0.jsonl.zst", [line("a")])
    assert [path for path, _ in build_manifest(str(tmp_path)).shards] == ["s0.jsonl.zst"]


@pytest.mark.parametrize(("root", "field"), [("", "text"), ("memory://", "content")])
def test_all_formats_hold_the_same_documents(tmp_path: Path, root: str, field: str) -> None:
    root = f"{root}{tmp_path if not root else uuid.uuid4().hex}"
    for number, form in enumerate(FORMATS):
        with fsspec.open(f"{root}/sub{number}/shard{form}", "wb", auto_mkdir=True) as file:
            file.write(packed_in(form, field))
    with fsspec.open(f"{root}/README.md", "wb") as file:
        file.write(b"no shard")
    manifest = build_manifest(root, text_field=field)
    assert [path for path, _ in manifest.shards] == [f"sub{n}/shard{form}" for n, form in enumerate(FORMATS)]
    expected = [Document(document(number).encode(), "") for number in NUMBERS]
    for relpath, _ in manifest.shards:
        assert documents_of(manifest, relpath) == expected


def test_another_text_field_is_another_corpus(tmp_path: Path) -> None:
    write_shard(tmp_path / "s0.jsonl.zst", [line("a")])
    default, text, content = (
        build_manifest(str(tmp_path), *field).fingerprint for field in ((), ("text",), ("content",))
    )
    assert default == text != content


@pytest.mark.parametrize("form", [form for form in FORMATS if form != ".parquet"])
def test_a_byte_order_mark_is_no_bad_line(tmp_path: Path, form: str) -> None:
    """PowerShell and Excel begin UTF-8 files with this mark. Elsewhere the character is text."""
    pack = {".jsonl": bytes, ".jsonl.zst": zstandard.compress, ".jsonl.gz": gzip.compress}[form]
    of_a = Document(b"a", "Synthetic")
    for text, expected in {
        line("a") + b"\n" + line("\ufeffb"): [of_a, Document("\ufeffb".encode(), "Synthetic")],
        line("a"): [of_a],
        b"": ["empty_text"],
    }.items():
        (tmp_path / f"s{form}").write_bytes(pack(b"\xef\xbb\xbf" + text))
        assert documents_of(build_manifest(str(tmp_path)), f"s{form}") == expected


def test_gzip_faults(tmp_path: Path) -> None:
    packed = gzip.compress(packed_lines())
    flipped = packed[:400] + bytes([packed[400] ^ 255]) + packed[401:]
    for wrong in (packed[:-300], b"", flipped, packed + b"x"):
        (tmp_path / "s.jsonl.gz").write_bytes(wrong)
        manifest = build_manifest(str(tmp_path))
        with pytest.raises(DataFault, match=r"s\.jsonl\.gz is truncated or corrupt"):
            documents_of(manifest, "s.jsonl.gz")
        kept = documents_of(manifest, "s.jsonl.gz", on_bad_shard="skip", max_bad_line_fraction=1)
        assert sum(isinstance(item, Document) for item in kept) <= len(NUMBERS)


LONG_LINE = line("a") + b"\n" + line("a" * (8 << 20))
BOMBS: dict[str, tuple[bytes, int]] = {
    # Fields: name: the shard, which needs more than 4 MiB of memory; documents that "skip" keeps.
    "line.jsonl.zst": (zstandard.compress(LONG_LINE), 0),
    "line.jsonl.gz": (gzip.compress(LONG_LINE), 1),
    "blank lines.jsonl.zst": (zstandard.compress(b"\n" * (1 << 20)), 0),
    "value.parquet": (parquet({"text": pa.array(["a" * (1 << 20)] * 9).dictionary_encode()}), 0),
    "rows.parquet": (parquet({"text": ["a"] * 100_000}, row_group_size=100_000), 0),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_shard_that_unpacks_to_far_too_much_is_a_bad_one(tmp_path, name, monkeypatch):
    monkeypatch.setattr(unpack, "MOST_UNPACKED_BYTES", 4 << 20)
    packed, kept = BOMBS[name]
    (tmp_path / name).write_bytes(packed)
    manifest, counters = build_manifest(str(tmp_path)), Counter[str]()
    message = rf"{name} unpacks to more than 4194304 bytes .*\(split it .*; restore it, or"
    with pytest.raises(DataFault, match=message):
        documents_of(manifest, name)
    assert len(read_documents(manifest, name, Reading("skip"), counters)) == kept
    assert counters == Counter(shards_read=1, shards_damaged=1)
    monkeypatch.setattr(unpack, "MOST_UNPACKED_BYTES", 1 << 27)
    assert documents_of(manifest, name, max_bad_line_fraction=1)


# Parquet


def test_parquet_sources_and_bad_rows(tmp_path: Path) -> None:
    rows = {
        b"good": Document(b"good", "X"),
        b"\xff\xfe": "bad_utf8",
        b"\xed\xa0\x80": "bad_utf8",  # a lone surrogate
        None: "missing_text",
        " \u3000\n".encode(): "empty_text",
        b"a" * 50: "huge_document",
        b"also good": Document(b"also good", ""),
    }
    text = pa.Array.from_buffers(pa.string(), len(rows), pa.array([*rows]).buffers())  # perhaps no UTF-8
    meta = [
        {"redpajama_set_name": "X"}, None, {"redpajama_set_name": "Y"}, {"redpajama_set_name": None},
        *[None] * 3,
    ]  # fmt: skip
    (tmp_path / "s.parquet").write_bytes(parquet({"text": text, "meta": meta}))
    manifest = build_manifest(str(tmp_path))
    limits = {"max_document_bytes": 49, "max_bad_line_fraction": 0.5}
    assert documents_of(manifest, "s.parquet", **limits) == [*rows.values()]
    with pytest.raises(DataFault, match=r"3 bad lines of 7 \(bad_utf8 2, empty_text 1, missing_text 1"):
        documents_of(manifest, "s.parquet")


def named(values: Any) -> Any:
    return pa.StructArray.from_arrays([values], ["redpajama_set_name"])


def test_parquet_columns_of_sources() -> None:
    names, texts = pa.array(["X", None]), ["a", "b"]
    for columns, sources in (
        ({"meta": named(names)}, [b"X", None]),
        ({"meta.redpajama_set_name": names}, [b"X", None]),  # flat, as pandas.json_normalize writes it
        ({"meta.redpajama_set_name": names, "meta": ["1", "2"]}, [b"X", None]),
        ({"meta": named(pa.array([1, 2]))}, [None, None]),  # as from JSON lines
        ({"meta": named(pa.nulls(2))}, [None, None]),
        ({"meta": ["1", "2"]}, [None, None]),
        ({"meta.redpajama_set_name": [0.5, 2.0]}, [None, None]),
    ):
        rows = parquet_rows(parquet({"text": texts, **columns}), "text", "s")
        assert rows == ([*zip((b"a", b"b"), sources, strict=True)], "")


def test_parquet_columns_of_one_name() -> None:
    buffer, names, texts = io.BytesIO(), pa.array(["X", "Y"]), pa.array(["a", "b"])
    pq.write_table(pa.Table.from_arrays([texts, texts], names=["text", "text"]), buffer)
    assert parquet_rows(buffer.getvalue(), "text", "s") == ([], "has several columns 'text'")
    buffer = io.BytesIO()
    columns = [texts, named(names), named(texts)]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "meta", "meta"]), buffer)
    assert parquet_rows(buffer.getvalue(), "text", "s") == ([(b"a", b"X"), (b"b", b"Y")], "")


def test_parquet_faults(tmp_path: Path) -> None:
    texts = [document(number) * 20 for number in NUMBERS]
    path = tmp_path / "s.parquet"
    whole = parquet({"text": texts}, use_dictionary=False, write_page_checksum=True)
    damaged = bytearray(whole)
    last = pq.ParquetFile(io.BytesIO(whole)).metadata.row_group(2).column(0)
    damaged[last.data_page_offset + last.total_compressed_size - 9] ^= 0x55
    cases = {
        "truncated": (whole[:-20], "is truncated or corrupt after 0 rows", 0),
        "no Parquet": (b"PAR1 of another kind", "is truncated or corrupt", 0),
        "flipped bits": (bytes(damaged), "is truncated or corrupt after 20 rows", 20),
        "no such column": (parquet({"body": texts}), r"has no column 'text' \(its columns: body\)", 0),
        "not text": (parquet({"text": [1, 2]}), "holds int64 in column 'text', not text", 0),
    }
    for content, message, kept in cases.values():
        path.write_bytes(content)
        manifest, counters = build_manifest(str(tmp_path)), Counter[str]()
        with pytest.raises(DataFault, match=message):
            documents_of(manifest, "s.parquet")
        assert len(read_documents(manifest, "s.parquet", Reading("skip"), counters)) == kept
        assert counters == Counter(shards_read=1, shards_damaged=1)


TEXT_TYPES = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.large_binary()),
]  # fmt: skip
"""All types that pyarrow can write. Polars and DataFusion write views, Polars also categories."""


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_and_source_may_have_any_type_of_text(kind: Any) -> None:
    def typed(values: list[Any]) -> Any:
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        column = pa.array(values).cast(value)
        return column.dictionary_encode() if pa.types.is_dictionary(kind) else column

    texts, names = ["over twelve bytes \u6f22", "b", None], ["X", None, "A source of over twelve bytes"]
    expected = [(b"over twelve bytes \xe6\xbc\xa2", b"X"), (b"b", None), (None, names[2].encode())]
    for sources in ({SOURCE_COLUMN: typed(names)}, {"meta": named(typed(names))}):
        assert parquet_rows(parquet({"text": typed(texts), **sources}), "text", "s") == (expected, "")


def test_missing_pyarrow_is_named_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "s.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = r"s\.parquet needs pyarrow; run in the checkout: pip install '\.\[parquet\]'"
    with pytest.raises(DataFault, match=message):
        build_manifest(str(tmp_path))


@pytest.mark.parametrize(
    ("address", "message"),
    [("nothing://x/y", "Protocol not known"), ("sftp://host/x", "pip install paramiko")],
)
def test_an_address_that_cannot_be_read_names_the_remedy(address, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(DataFault, match=message):
        build_manifest(address)


# Copies


def test_a_copied_shard_is_refused_or_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, numbers in {"a": range(40), "b": range(40, 80), "c": range(40)}.items():
        write_shard(tmp_path / f"{name}.jsonl.zst", [line(document(number)) for number in numbers])
    with pytest.raises(DataFault, match=r"c\.jsonl\.zst is a copy of a\.jsonl\.zst .*on_bad_shard=skip"):
        build_manifest(str(tmp_path))
    reading = Reading("skip")
    manifest = build_manifest(str(tmp_path), reading=reading)
    assert [path for path, _ in manifest.shards] == ["a.jsonl.zst", "b.jsonl.zst"]
    assert manifest.duplicates == ("c.jsonl.zst",)
    config = StreamConfig(seq_len_tokens=32, num_lanes=2, seed=0, reading=reading)
    first = read_run(manifest, tokenizer, config, world_size=2, steps=1, global_batch_size=4)
    assert first.state()["counters"]["shards_duplicate"] == 1
    again = read_run(manifest, tokenizer, config, steps=1, global_batch_size=4, state=first.state())
    assert again.state()["counters"]["shards_duplicate"] == 1  # not once per start


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "jsonl.gz", "parquet"])
def test_empty_shards_are_no_copies(tmp_path: Path, form: str) -> None:
    """Filters and Spark write a file for each part, and files without documents are equal."""
    content = {
        "jsonl": b"\n",
        "jsonl.zst": zstandard.compress(b""),
        "jsonl.gz": gzip.compress(b"", mtime=0),
        "parquet": parquet({"text": pa.array([], pa.string())}),
    }[form]
    for name in "abc":
        (tmp_path / f"{name}.{form}").write_bytes(content)
    write_shard(tmp_path / "d.jsonl.zst", [line(document(1))])
    policies = Reading("fail"), Reading("skip")
    failing, skipping = (build_manifest(str(tmp_path), reading=policy) for policy in policies)
    assert [path for path, _ in failing.shards] == [f"a.{form}", "d.jsonl.zst"]
    assert failing.fingerprint == skipping.fingerprint
    assert (failing.duplicates, skipping.duplicates) == ((), (f"b.{form}", f"c.{form}"))


@pytest.mark.parametrize("changed_byte", [0, (1 << 20) - 1, (5 << 20) - 1])
def test_shards_of_one_size_are_compared_by_their_ends(tmp_path: Path, changed_byte: int) -> None:
    content = np.random.default_rng(0).integers(97, 122, 5 << 20, dtype=np.uint8)
    content.tofile(tmp_path / "a.jsonl")
    content[changed_byte] ^= 1
    content.tofile(tmp_path / "b.jsonl")
    assert len(build_manifest(str(tmp_path)).shards) == 2
    content.tofile(tmp_path / "c.jsonl")
    with pytest.raises(DataFault, match=r"c\.jsonl is a copy of b\.jsonl"):
        build_manifest(str(tmp_path))
