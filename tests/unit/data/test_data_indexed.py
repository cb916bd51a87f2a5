import logging
import struct
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from data_corpus import document, held_by_parts

from gsa_data.corpus import Corpus, open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.indexed import HEADER, IndexedFolder
from gsa_data.lanes import LaneReader
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=4, seed=7, prefetch_blocks=24)
WITHOUT_EOS = 7  # every seventh document


def write_indexed(folder: Path, name: str, documents: list[np.ndarray], code: int = 8) -> None:
    """Write one dataset; documents of more than 60 tokens span two sequences."""
    id_type = {4: "<i4", 8: "<u2"}[code]
    sequences = [part for ids in documents for part in ((ids[:60], ids[60:]) if len(ids) > 60 else (ids,))]
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(id_type).itemsize
    firsts = np.cumsum([0] + [2 if len(ids) > 60 else 1 for ids in documents]).astype("<i8")
    (folder / f"{name}.bin").write_bytes(np.concatenate(documents).astype(id_type).tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(firsts))
    tables = lengths.tobytes() + pointers.tobytes() + firsts.tobytes()
    (folder / f"{name}.idx").write_bytes(header + tables)


@pytest.fixture
def written(tokenizer: Tokenizer, tmp_path: Path) -> list[list[int]]:
    """Write two datasets, and return their documents with an EOS each."""
    documents = []
    for number in range(120):
        ids = tokenizer.encode(document(number))
        with_eos = np.append(ids, np.int32(tokenizer.eos_id))
        documents.append(ids if number % WITHOUT_EOS == 0 else with_eos)
    write_indexed(tmp_path, "a_text_document", documents[:80])
    write_indexed(tmp_path, "b_text_document", documents[80:], code=4)
    assert max(map(len, documents)) > 60
    eos = tokenizer.eos_id
    return [[*ids.tolist(), eos] if ids[-1] != eos else ids.tolist() for ids in documents]


def documents_of(corpus: Corpus, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    lanes = LaneReader(shard_reader(corpus, tokenizer, Reading()), StreamConfig(32, num_lanes=1, seed=0))
    return [tokens.tolist() for _, tokens in islice(lanes.pieces(0), count)]


def test_every_document_once_an_epoch(written, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        corpus = open_corpus(str(tmp_path))
    assert isinstance(corpus, IndexedFolder)
    assert "indexed datasets: 2, with 120 documents" in caplog.text
    read = documents_of(corpus, tokenizer, 240)
    assert sorted(read[:120]) == sorted(read[120:]) == sorted(written)
    assert read[:120] != read[120:]


def test_a_part_holds_its_own_documents_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_indexed(tmp_path, "a", [np.array([5, tokenizer.eos_id])] * 40_000)
    reader = shard_reader(open_corpus(str(tmp_path)), tokenizer, Reading())
    parts, held_bytes = held_by_parts(reader, "a.bin", 20)
    assert sum(map(len, parts)) == 40_000
    # Each document needs its beginning and end; the whole table would take 320,000 bytes per part.
    assert held_bytes < 2 * 16 * 40_000


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_reads_what_megatron_core_writes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "text.bin"), np.uint16)
    documents = [[*tokenizer.encode(document(number)).tolist(), tokenizer.eos_id] for number in range(30)]
    for ids in documents:
        builder.add_document(torch.tensor(ids), [10, len(ids) - 10] if len(ids) > 10 else [len(ids)])
    builder.finalize(str(tmp_path / "text.idx"))
    assert sorted(documents_of(open_corpus(str(tmp_path)), tokenizer, 30)) == sorted(documents)


def flip(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def without_name(path: Path) -> None:
    path.rename(path.with_name(path.suffix))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a_text_document.idx", partial(flip, at=0, value=b"TNTIDX"), "not an index of a megatron"),
        ("a_text_document.idx", partial(flip, at=9, value=b"\2"), "version 2"),
        ("a_text_document.idx", partial(flip, at=17, value=b"\7"), "id type 7"),
        ("a_text_document.idx", partial(cut, at=34), r"\.idx has 34 bytes where its header says"),
        ("a_text_document.idx", partial(cut, at=7), "not an index of a megatron"),
        ("a_text_document.bin", partial(cut, at=34), r"\.bin has 34 bytes where a_text_document\.idx"),
        ("a_text_document.bin", partial(cut, at=0), r"\.bin has 0 bytes"),
        ("a_text_document.bin", Path.unlink, r"a_text_document\.bin is missing"),
        ("b_text_document.idx", Path.unlink, r"b_text_document\.idx is missing"),
        ("a_text_document.idx", without_name, r"/\.idx has no name before its ending; rename"),
        ("a_text_document.bin", without_name, r"/\.bin has no name before its ending; rename"),
    ],
)
def test_wrong_files_are_refused_at_the_start(written, tmp_path, name, damage, message):
    damage(tmp_path / name)
    with pytest.raises(DataFault, match=message):
        open_corpus(str(tmp_path))


def test_damage_is_refused_when_read(written: list[list[int]], tokenizer: Tokenizer, tmp_path: Path) -> None:
    index = tmp_path / "a_text_document.idx"
    good = index.read_bytes()
    flip(index, HEADER.size, struct.pack("<i", 1))  # the first length
    with pytest.raises(DataFault, match="lengths, pointers and documents do not fit"):
        documents_of(open_corpus(str(tmp_path)), tokenizer, 120)
    index.write_bytes(good)
    flip(tmp_path / "a_text_document.bin", 40, struct.pack("<H", 320))
    stream = BlockStream(open_corpus(str(tmp_path)), tokenizer, CONFIG, 0, 1)
    message = r"ids from \d+ to 320, but the vocabulary has 320; give the tokenizer"
    with pytest.raises(DataFault, match=message):
        stream.next_blocks(200)


@pytest.mark.parametrize(("suffix", "num_workers"), [(".bin", 1), (".idx", 0)])
def test_a_dataset_that_vanishes_is_named(written, tokenizer, tmp_path, suffix, num_workers):
    config = replace(CONFIG, num_workers=num_workers)
    stream = BlockStream(open_corpus(str(tmp_path)), tokenizer, config, 0, 1)
    (tmp_path / f"a_text_document{suffix}").unlink()
    with pytest.raises(DataFault, match=rf"a_text_document cannot be read .*a_text_document\{suffix}"):
        stream.next_blocks(8)
    stream.close()
