"""Tests that prepared tokens give the same as streaming, and that a start rejects tokens that do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import orjson
import pytest
from data_corpus import Run, document, held_by_parts, line, write_corpus, write_shard

import gsa_data.token_files
from gsa_data import BlockStream, DataFault, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import Reading
from gsa_data.prepare_tokens import check_tokens, prepare_tokens
from gsa_data.token_files import MANIFEST_NAME, TokenFolder

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)
FAULTY = Reading("skip", max_bad_line_fraction=0.05)


@pytest.fixture(scope="module")
def tokens(corpus: Manifest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    out = tmp_path_factory.mktemp("tokens")
    return prepare_tokens(corpus.root, tokenizer, out, 1, Reading())


@pytest.fixture
def copy(tokens: TokenFolder, tmp_path: Path) -> Path:
    """Copy a folder of tokens that a test may damage."""
    shutil.copytree(tokens.root, tmp_path / "copy")
    return tmp_path / "copy"


def until_second_epoch(corpus: Manifest | TokenFolder, tokenizer: Tokenizer, config: StreamConfig) -> Run:
    run = Run(corpus, tokenizer, config)
    while min(cursor[0] for cursor in run.state()["cursors"]) < 2:
        run.step(64, micro_batch_size=8)
    run.close()
    return run


def test_a_part_holds_its_own_lines_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_shard(tmp_path / "s.jsonl.zst", [line(f"{number}") for number in range(5000)])
    folder = prepare_tokens(str(tmp_path), tokenizer, tmp_path / "out", 1, Reading())
    parts, held_bytes = held_by_parts(shard_reader(folder, tokenizer, Reading()), "s.jsonl.zst", 20)
    assert sum(map(len, parts)) == 5000
    assert held_bytes < 2 * 5 * 8 * 5000  # five columns of int64; the whole table would take 160,000 per part


# The same as streaming


def test_faults_are_counted_as_when_streaming(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_corpus(source, num_shards=4, documents_per_shard=60)
    good = [line(document(number)) for number in range(1000, 1100)]
    write_shard(source / "chunk1/s0.jsonl.zst", [b"", *good, b'{"text": "cut', line(""), b'{"text": "\xff"}'])
    write_shard(source / "chunk1/s1.jsonl.zst", [line("x" * 900), line(document(5))])
    write_shard(source / "chunk1/s4.jsonl.zst", [*good[:5], b"{"])  # too many bad lines
    truncated = source / "chunk1/s2.jsonl.zst"
    truncated.write_bytes(truncated.read_bytes()[:-20])
    shutil.copyfile(source / "chunk1/s3.jsonl.zst", source / "chunk1/s5.jsonl.zst")
    reading = replace(FAULTY, max_document_bytes=800)
    config = replace(CONFIG, num_lanes=2, reading=reading)

    fail = replace(reading, on_bad_shard="fail")
    with pytest.raises(DataFault, match="holds a shard twice"):
        prepare_tokens(str(source), tokenizer, tmp_path / "out", 1, fail)
    folder = prepare_tokens(str(source), tokenizer, tmp_path / "out", 1, reading)
    corpus = build_manifest(str(source), reading=reading)
    runs = [until_second_epoch(each, tokenizer, config) for each in (corpus, folder)]
    assert runs[0].samples == runs[1].samples
    assert runs[0].state() == runs[1].state()
    counters = runs[0].state()["counters"]
    for name in ("bad_json", "bad_utf8", "empty_text", "huge_document", "shards_damaged", "shards_bad_lines"):
        assert counters[name] >= 2
    assert counters["shards_duplicate"] == 1

    strict = replace(config, reading=fail)
    with pytest.raises(DataFault, match=r"held 1 shards twice.*remove them there and prepare"):
        until_second_epoch(folder, tokenizer, strict)
    (source / "chunk1/s5.jsonl.zst").unlink()
    with pytest.raises(DataFault, match=r"s2\.jsonl\.zst is truncated"):
        prepare_tokens(str(source), tokenizer, tmp_path / "other", 1, fail)
    folder = prepare_tokens(str(source), tokenizer, tmp_path / "other", 1, reading)
    # The error comes at the start, not when a run reaches such a shard after days.
    with pytest.raises(DataFault, match=r"was bad in the source \(shards_\w+\), and 1 more"):
        BlockStream(folder, tokenizer, strict, 0, 1)
    for name, value in (("max_bad_line_fraction", 0.5), ("max_document_bytes", 99)):
        other = replace(config, reading=replace(reading, **{name: value}))
        with pytest.raises(DataFault, match=f"made with {name}=.*set {name}="):
            BlockStream(folder, tokenizer, other, 0, 1)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Letters:
        fingerprint, path, vocab_size, eos_id = "letters", "letters.model", 1 << 17, 0

        def encode(self, text: bytes) -> np.ndarray:
            return np.frombuffer(text, np.uint8).astype(np.int32) + (1 << 16)

    write_shard(tmp_path / "source/s.jsonl.zst", [line("ab")])
    tokenizer: Tokenizer = Letters()  # type: ignore[assignment]
    folder = prepare_tokens(str(tmp_path / "source"), tokenizer, tmp_path / "out", 1, Reading())
    assert folder.identity.dtype == np.int32
    stored = np.fromfile(tmp_path / "out/s.jsonl.zst.tokens", np.int32)
    assert stored.tolist() == [(1 << 16) + 97, (1 << 16) + 98, 0]
    tokenizer.vocab_size = 1 << 16
    with pytest.raises(DataFault, match=r"s\.jsonl\.zst, line 1: the tokenizer gave id 65634"):
        prepare_tokens(str(tmp_path / "source"), tokenizer, tmp_path / "other", 1, Reading())


def test_other_tokens_in_the_folder_are_kept(corpus, tokenizer, copy, sample_folder):
    other = Tokenizer(str(sample_folder / "tokenizer.model"))
    with pytest.raises(DataFault, match=r"holds tokens with tokenizer_fingerprint=.*another --out"):
        prepare_tokens(corpus.root, other, copy, 1, Reading())
    with pytest.raises(DataFault, match="max_document_bytes"):
        prepare_tokens(corpus.root, tokenizer, copy, 1, Reading(max_document_bytes=10))
    assert list(check_tokens(copy, corpus.root, tokenizer)) == []
    assert any("made by tokenizer" in problem for problem in check_tokens(copy, None, other))
    of_others = check_tokens(copy, str(sample_folder / "train"), None)
    assert any("other shards" in problem for problem in of_others)
    with pytest.raises(DataFault, match="was made by tokenizer"):
        BlockStream(open_corpus(str(copy)), other, CONFIG, 0, 1)
    with pytest.raises(DataFault, match="made of text_field=text, this run has body; set text_field=text"):
        open_corpus(str(copy), text_field="body")


# What is refused at the start


@pytest.mark.parametrize("suffix", [".tokens", ".lines"])
def test_files_of_another_size_are_named(copy: Path, suffix: str) -> None:
    path = copy / f"chunk1/s2.jsonl.zst{suffix}"
    path.write_bytes(path.read_bytes() + b"\0\0")
    size = path.stat().st_size
    with pytest.raises(DataFault, match=rf"has {size} bytes where {MANIFEST_NAME} says {size - 2}"):
        open_corpus(str(copy))
    path.unlink()
    with pytest.raises(DataFault, match=rf"s2\.jsonl\.zst{suffix} is missing"):
        open_corpus(str(copy))


def test_damage_is_refused_at_the_first_opening_and_never_skipped(tokenizer: Tokenizer, copy: Path) -> None:
    path = copy / "chunk1/s2.jsonl.zst.tokens"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    config = replace(CONFIG, num_workers=1, reading=Reading("skip", 0.01))
    stream = BlockStream(open_corpus(str(copy)), tokenizer, config, 0, 1)
    others = set(active_children())
    with pytest.raises(DataFault, match=r"s2\.jsonl\.zst\.tokens is damaged: its sha256 is"):
        stream.next_blocks(400)
    stream.close()
    assert set(active_children()) <= others  # its readers have ended
    assert len(list(check_tokens(copy, None, None))) == 1


def test_ids_beyond_the_vocabulary_are_refused(tokenizer: Tokenizer, copy: Path) -> None:
    path = copy / "chunk1/s2.jsonl.zst.tokens"
    ids = np.fromfile(path, np.uint16)
    ids[5] = 320
    ids.tofile(path)
    manifest = orjson.loads((copy / MANIFEST_NAME).read_bytes())
    del manifest["checksum"]
    manifest["records"][2]["tokens_sha256"] = gsa_data.token_files.hashlib.sha256(ids).hexdigest()
    manifest["checksum"] = gsa_data.token_files.checksum_of(manifest)
    (copy / MANIFEST_NAME).write_bytes(orjson.dumps(manifest))
    stream = BlockStream(open_corpus(str(copy)), tokenizer, CONFIG, 0, 1)
    with pytest.raises(DataFault, match=r"holds ids from \d+ to 320, the vocabulary ends at 319"):
        stream.next_blocks(400)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content["identity"].update(format_version=9), "format version 9"),
        (lambda content: content["identity"].pop("eos_id"), "is damaged"),
        (lambda content: content["source_shards"].pop(), "list of shards was changed"),
        (lambda content: content["records"].pop(), "list of shards was changed"),
        (lambda content: content.pop("records"), "is damaged"),
    ],
)
def test_damaged_manifests_are_refused(copy: Path, damage: Callable[[dict], object], message: str) -> None:
    content = orjson.loads((copy / MANIFEST_NAME).read_bytes())
    del content["checksum"]
    damage(content)
    content["checksum"] = gsa_data.token_files.checksum_of(content)
    (copy / MANIFEST_NAME).write_bytes(orjson.dumps(content))
    with pytest.raises(DataFault, match=message):
        open_corpus(str(copy))


def test_tokens_must_be_local() -> None:
    with fsspec.open(f"memory://run/{MANIFEST_NAME}", "wb") as file:
        file.write(b"{}")
    with pytest.raises(DataFault, match="which only local files can map"):
        open_corpus("memory://run")


def test_unreadable_files_are_named(tokenizer, tokens, monkeypatch):
    stream = BlockStream(tokens, tokenizer, replace(CONFIG, reading=Reading(retries=0)), 0, 1)
    monkeypatch.setattr(np, "memmap", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(DataFault, match=r"the tokens of shard chunk1/s\d.*cannot be read"):
        stream.next_blocks(1)
