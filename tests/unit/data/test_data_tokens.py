"""Tests the datasets that `prepare.py tokens` writes, and that tokens that do not fit are refused."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from data_corpus import document, line, write_corpus, write_shard

from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.indexed import IndexedFolder
from gsa_data.prepare_tokens import check_tokens, prepare_tokens
from gsa_data.prepared import RECORD
from gsa_data.shards import Manifest
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)


@pytest.fixture
def tokens(corpus: Manifest, tokenizer: Tokenizer, tmp_path: Path) -> IndexedFolder:
    return prepare_tokens(corpus.root, tokenizer, tmp_path / "tokens", 1, Reading())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_files_are_those_of_megatron_core(
    tokens: IndexedFolder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    for shard, (name, _) in enumerate(tokens.manifest.shards):
        assert name == f"{shard:06d}-chunk1-s{shard}.jsonl.zst.bin"
        builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "text.bin"), np.uint16)
        for number in range(40 * shard, 40 * shard + 40):
            ids = [*tokenizer.encode(document(number)).tolist(), tokenizer.eos_id]
            builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(str(tmp_path / "text.idx"))
        for suffix in (".bin", ".idx"):
            written = (tokens.root / name).with_suffix(suffix).read_bytes()
            assert written == (tmp_path / f"text{suffix}").read_bytes()


def test_bad_lines_and_shards_are_left_out_by_policy(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    good = [line(document(number)) for number in range(100)]
    write_shard(source / "s0.jsonl.zst", [b"", *good, b'{"text": "cut', line("x" * 900), b'{"text": "\xff"}'])
    write_shard(source / "s1.jsonl.zst", [*good[:5], b"{"])  # too many bad lines
    skip = Reading("skip", max_bad_line_fraction=0.05, max_document_bytes=800)
    fail = replace(skip, on_bad_shard="fail")
    with pytest.raises(DataFault, match=r"s1\.jsonl\.zst has 1 bad lines of 6"):
        prepare_tokens(str(source), tokenizer, out, 1, fail)
    folder = prepare_tokens(str(source), tokenizer, out, 1, skip)
    reader = shard_reader(folder, tokenizer, skip)
    lines = [reader.open(name, 0, 1, Counter()) for name, _ in folder.manifest.shards]
    assert [*map(len, lines)] == [100, 0]
    for place, number in enumerate(range(100)):
        assert tokenizer.decode(lines[0][place].tokens[:-1]).strip() == document(number)
    assert [record.left_out for record in folder.records.values()] == [
        {"empty_text": 1, "bad_json": 1, "huge_document": 1, "bad_utf8": 1},
        {"shards_bad_lines": 1},
    ]
    # The error comes at the start, not when a run reaches such a shard after days.
    with pytest.raises(DataFault, match=r"shard s1\.jsonl\.zst of the tokens in .* was bad in the text"):
        BlockStream(folder, tokenizer, replace(CONFIG, reading=fail), 0, 1)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Letters:
        fingerprint, path, vocab_size, eos_id = "letters", "letters.model", 1 << 17, 0

        def encode(self, text: bytes) -> np.ndarray:
            return np.frombuffer(text, np.uint8).astype(np.int32) + (1 << 16)

    write_shard(tmp_path / "source/s.jsonl.zst", [line("ab")])
    tokenizer: Tokenizer = Letters()  # type: ignore[assignment]
    folder = prepare_tokens(str(tmp_path / "source"), tokenizer, tmp_path / "out", 1, Reading())
    reader = shard_reader(folder, tokenizer, Reading())
    (read,) = reader.open("000000-s.jsonl.zst.bin", 0, 1, Counter())
    assert read.tokens.dtype == np.int32
    assert read.tokens.tolist() == [(1 << 16) + 97, (1 << 16) + 98, 0]
    tokenizer.vocab_size = 1 << 16
    with pytest.raises(DataFault, match=r"s\.jsonl\.zst, line 1: the tokenizer gave id 65634"):
        prepare_tokens(str(tmp_path / "source"), tokenizer, tmp_path / "other", 1, Reading())


def test_other_tokens_are_refused(corpus, tokenizer, tokens, tmp_path, sample_folder):
    other = Tokenizer(str(sample_folder / "tokenizer.model"))
    with pytest.raises(DataFault, match=r"holds tokens with tokenizer=.*another --out"):
        prepare_tokens(corpus.root, other, tokens.root, 1, Reading())
    with pytest.raises(DataFault, match="max_document_bytes"):
        prepare_tokens(corpus.root, tokenizer, tokens.root, 1, Reading(max_document_bytes=10))
    assert list(check_tokens(tokens.root, corpus.root, tokenizer)) == []
    assert any("made by tokenizer" in problem for problem in check_tokens(tokens.root, None, other))
    of_others = check_tokens(tokens.root, str(sample_folder / "train"), None)
    assert any("other shards" in problem for problem in of_others)
    with pytest.raises(DataFault, match="made by tokenizer"):
        BlockStream(open_corpus(str(tokens.root)), other, CONFIG, 0, 1)
    for path in tokens.root.glob("000000-*"):
        suffix = RECORD if path.name.endswith(RECORD) else path.suffix
        shutil.copyfile(path, tokens.root / f"text_document{suffix}")
    with pytest.raises(DataFault, match="holds the dataset 'text_document' of another text"):
        prepare_tokens(corpus.root, tokenizer, tokens.root, 1, Reading())
    with pytest.raises(DataFault, match="holds 6 prepared datasets of a text with 5 shards"):
        open_corpus(str(tokens.root))
    write_corpus(tmp_path / "text", num_shards=1, documents_per_shard=3)
    with pytest.raises(DataFault, match=r"--out .* is the folder of the shards"):
        prepare_tokens(str(tmp_path / "text"), tokenizer, tmp_path / "text/chunk1" / "..", 1, Reading())


def test_tokens_must_be_local() -> None:
    with fsspec.open("memory://run/text_document.idx", "wb") as file:
        file.write(b"{}")
    with pytest.raises(DataFault, match="which only local files can map"):
        open_corpus("memory://run")
