"""Read megatron-core's indexed datasets (NAME.bin and NAME.idx) as a corpus of tokens.

All numbers in NAME.idx are little-endian. The file has these fields, in this order:

    9 bytes      "MMIDIDX\\0\\0"
    int64        version, which is 1
    int8         code of the id type
    int64        S, the number of sequences
    int64        D, the number of documents + 1
    int32 [S]    length of each sequence in tokens
    int64 [S]    byte offset of each sequence in NAME.bin
    int64 [D]    number of the first sequence of each document; the last entry is S

This is the layout of megatron.core.datasets.indexed_dataset.

Each dataset counts as a shard, and each document as a line of the shard. A document's source is the sub-folder that
contains the dataset, or NO_SOURCE if the dataset is directly in the corpus folder.

This module is stricter than megatron-core. Sizes and offsets must match exactly. Ids must be in the vocabulary. A
dataset written by `prepare.py tokens` must match its record (prepared.py).
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa_data.faults import DataFault, Reading
from gsa_data.fetch import Pulse, patiently
from gsa_data.listing import INDEXED
from gsa_data.pack import AnyTokens
from gsa_data.prepared import AGAIN, Record, check_complete, check_records, problem_of, read_record
from gsa_data.reader import EncodedDocument, ShardLines
from gsa_data.shards import Manifest
from gsa_data.source_weights import NO_SOURCE, LineSources
from gsa_data.tokenize import Tokenizer

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
COPY_AGAIN = "copy it again, or write it again with megatron-core"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    id_type: np.dtype[Any]
    sequences: int
    documents: int


@dataclass(frozen=True)
class IndexedFolder:
    """Holds the indexed datasets in a folder and in its sub-folders. `manifest` lists the .bin files."""

    root: Path
    manifest: Manifest
    records: dict[str, Record] = field(default_factory=dict)
    """.bin file -> its record, for datasets from `prepare.py tokens`"""

    @classmethod
    def open(cls, root: str, pulse: Pulse | None = None) -> IndexedFolder:
        """Read the header of every dataset and compare the sizes. Sub-folders of sub-folders are not read.

        Raises DataFault for a file of wrong size or format, a file named only `.bin` or `.idx`, a missing file, or a
        folder that `prepare.py tokens` has not finished.
        """
        base = Path(root)
        shards: list[tuple[str, int]] = []
        records: dict[str, Record] = {}
        documents = 0
        for folder in (base, *sorted(path for path in base.iterdir() if path.is_dir())):
            records_here = {}
            for dataset in datasets_in(folder):
                if pulse is not None:
                    pulse.beat()
                relpath = f"{dataset.relative_to(base)}.bin"
                documents += open_index(Path(f"{dataset}.idx")).header.documents
                shards.append((relpath, Path(f"{dataset}.bin").stat().st_size))
                if record := read_record(str(dataset)):
                    records_here[relpath] = record
            check_complete(records_here, str(folder))
            records |= records_here
        logger.info(
            "%s holds megatron-core's indexed datasets: %d, with %d documents, memory-mapped; nothing is tokenized%s",
            root,
            len(shards),
            documents,
            ""
            if len(records) == len(shards)
            else f", and data.tokenizer must be the one that made them, because {len(shards) - len(records)} have no "
            "tokenizer on record",
        )
        mixes = any("/" in relpath for relpath, _ in shards)
        return cls(base, Manifest(root, tuple(shards), mixed_documents=documents if mixes else 0), records)

    def source_of(self, relpath: str) -> str:
        """Returns the source of the documents of a .bin file: its sub-folder, or NO_SOURCE."""
        return relpath.rpartition("/")[0] or NO_SOURCE


def datasets_in(folder: Path) -> list[Path]:
    """Returns the datasets in a folder, sorted, without file endings. Raises DataFault for a missing half or name."""
    files = [path for path in folder.iterdir() if not path.is_dir()]
    for path in files:
        if path.name in INDEXED:
            raise DataFault(f"{path} has no name before its ending; rename the .bin and the .idx")
    datasets = sorted({path.with_suffix("") for path in files if path.suffix in INDEXED})
    for path in (Path(f"{dataset}{suffix}") for dataset in datasets for suffix in (".bin", ".idx")):
        if not path.is_file():
            raise DataFault(f"{path} is missing: an indexed dataset is a .bin and an .idx; {COPY_AGAIN}")
    return datasets


@dataclass(frozen=True)
class Index:
    """Holds the memory-mapped tables of one .idx file."""

    header: Header
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    first_sequences: NDArray[np.int64]


def read_header(path: Path) -> Header:
    with path.open("rb") as file:
        content = file.read(HEADER.size)
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise DataFault(f"{path} is not an index of a megatron-core dataset: it begins with {content[:9]!r}")
    _, version, code, sequences, boundaries = HEADER.unpack(content)
    if version != 1 or code not in ID_TYPES:
        raise DataFault(
            f"{path} has version {version} and id type {code}; version 1 and the id types "
            f"{', '.join(map(str, ID_TYPES))} are read"
        )
    if boundaries == 0:
        raise DataFault(f"{path} is damaged: it has no document boundaries; {COPY_AGAIN}")
    return Header(np.dtype(ID_TYPES[code]), sequences, boundaries - 1)


def open_index(path: Path) -> Index:
    """Map the tables of one dataset, without reading them. Raises DataFault if a size is wrong."""
    header = read_header(path)
    sequences, boundaries = header.sequences, header.documents + 1
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    size = path.stat().st_size
    if size != expected:
        kind = "it is multimodal, which is not read" if size == expected + sequences else COPY_AGAIN
        raise DataFault(f"{path} has {size} bytes where its header says {expected}; {kind}")
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    at_pointers = HEADER.size + 4 * sequences
    at_documents = at_pointers + 8 * sequences
    index = Index(
        header,
        content[HEADER.size : at_pointers].view("<i4"),
        content[at_pointers:at_documents].view("<i8"),
        content[at_documents:].view("<i8"),
    )
    ids = path.with_suffix(".bin")
    size = ids.stat().st_size
    expected = 0
    if sequences:
        expected = int(index.pointers[-1]) + int(index.lengths[-1]) * header.id_type.itemsize
    if size != expected:
        raise DataFault(f"{ids} has {size} bytes where {path.name} says {expected}; {COPY_AGAIN}")
    return index


def check_index(index: Index, path: Path) -> None:
    """Read the whole index. Raises DataFault unless documents follow one another without gaps or overlaps."""
    ends = np.cumsum(index.lengths, dtype=np.int64) * index.header.id_type.itemsize
    firsts = index.first_sequences
    whole = (
        not (index.lengths < 0).any()
        and (index.pointers[:1] == 0).all()
        and np.array_equal(index.pointers[1:], ends[:-1])
        and firsts[0] == 0
        and firsts[-1] == index.header.sequences
        and (np.diff(firsts) >= 0).all()
    )
    if not whole:
        raise DataFault(f"{path} is damaged: its lengths, pointers and documents do not fit; {COPY_AGAIN}")


class IndexedReader:
    """Returns the documents of an IndexedFolder. Damage raises DataFault, regardless of the policy for bad shards."""

    def __init__(
        self, folder: IndexedFolder, tokenizer: Tokenizer, reading: Reading, weights: Mapping[str, float]
    ) -> None:
        """Raises DataFault if a weight belongs to no source, or if the records do not fit."""
        sources = {folder.source_of(relpath) for relpath, _ in folder.manifest.shards}
        if unknown := ", ".join(sorted(weights.keys() - sources)):
            raise DataFault(
                f"source_weights names {unknown}, but the sources of the datasets in {str(folder.root)!r} are "
                f"{', '.join(sorted(sources))}; name one of these, or put the datasets of a source into a sub-folder "
                "with its name (links will do)"
            )
        check_records(folder.records, tokenizer, reading, str(folder.root))
        self.folder, self.reading = folder, reading
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self._checked: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        return self.folder.manifest

    def open(self, relpath: str, part: int, parts: int, counters: Counter[str]) -> ShardLines:
        """Open the lines [part::parts] of a shard (see ShardReader.open). The first call for a shard checks the whole
        .idx file. If `prepare.py tokens` made the shard, this call also verifies the shard's checksum."""
        path = (self.folder.root / relpath).with_suffix(".idx")

        def mapped(pulse: Pulse) -> tuple[Index, AnyTokens, int]:
            index = open_index(path)
            if relpath not in self._checked:
                check_index(index, path)
                record = self.folder.records.get(relpath)
                if record and (problem := problem_of(str(path.with_suffix("")), record, pulse)):
                    raise DataFault(f"{problem}; {AGAIN}")
                self._checked.add(relpath)
            size = path.with_suffix(".bin").stat().st_size
            id_type = index.header.id_type
            if size == 0:  # an empty file cannot be mapped
                return index, np.empty(0, id_type), size
            return index, np.asarray(np.memmap(path.with_suffix(".bin"), id_type, "r")), size

        try:
            index, ids, size = patiently(mapped, str(path), self.reading, counters)
        except OSError as error:
            raise DataFault(f"indexed dataset {path.with_suffix('')} cannot be read ({error})") from error
        counters["shards_read"] += 1
        firsts = index.first_sequences
        places = (_places(index, each[part::parts], size).data for each in (firsts[:-1], firsts[1:]))
        where = (str(path), self.folder.source_of(relpath))
        return _IndexedLines(*where, self.vocab_size, self.eos_id, ids, *places)


def _places(index: Index, sequences: NDArray[np.int64], size_bytes: int) -> NDArray[np.int64]:
    """Returns where each of these sequences begins in the .bin file, counted in ids. Do not pass all sequences of a
    large dataset, because the result would take gigabytes in each lane."""
    places = np.full(len(sequences), size_bytes, np.int64)
    is_before = sequences < index.header.sequences
    places[is_before] = index.pointers[sequences[is_before]]
    places //= index.header.id_type.itemsize
    return places


@dataclass(frozen=True)
class _IndexedLines:
    path: str
    source: str
    vocab_size: int
    eos_id: int
    ids: AnyTokens
    begins: Sequence[int]
    """[lines], the place of each line's first token in `ids`"""
    ends: Sequence[int]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int, /) -> EncodedDocument | str:
        begin, end = self.begins[place], self.ends[place]
        tokens = self.ids[begin:end]
        if begin == end:
            return "empty_text"
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise DataFault(
                f"{self.path}: tokens {begin} to {end} hold ids from {tokens.min()} to {tokens.max()}, but the "
                f"vocabulary has {self.vocab_size}; give the tokenizer that made the dataset"
            )
        if tokens[-1] != self.eos_id:  # preprocess_data ran without --append-eod
            tokens = np.append(tokens.astype(np.int32), np.int32(self.eos_id))
        return EncodedDocument(tokens, 0, self.source)

    def sources(self) -> LineSources:
        is_empty = np.asarray(self.begins) == np.asarray(self.ends)
        return LineSources([self.source], np.where(is_empty, -1, 0))
