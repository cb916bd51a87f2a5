"""Read folders of tokens, which `prepare.py tokens` writes. The files are memory-mapped, and keep the source's order.

For every shard of the source the folder has two files at the same relative path:

    SHARD.tokens   the ids of all documents one after another, each with its EOS: little-endian uint16, or int32
                   if the vocabulary has more than 65536 entries
    SHARD.lines    little-endian int64: offsets [lines + 1] into the ids, text bytes [lines], faults [lines],
                   sources [lines]

A line with an entry k > 0 in `faults` has the k-th fault of the shard's record, and no tokens. Its entry in `sources`
is -1. For other lines this entry is a position (from 0) in the record's `sources`. `tokens.json` at the root lists the
shards, the tokenizer and one record per shard. It is written last.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gsa_data.faults import BAD_SHARDS, DataFault, Reading
from gsa_data.fetch import PIECE_BYTES, Pulse, patiently
from gsa_data.pack import AnyTokens
from gsa_data.reader import EncodedDocument, ShardLines
from gsa_data.shards import Manifest
from gsa_data.source_weights import NO_SOURCE, LineSources
from gsa_data.tokenize import Tokenizer

FORMAT_VERSION = 2
MANIFEST_NAME = "tokens.json"
JOURNAL_NAME = "tokens.journal"
"""The journal of finished shards. Its first line is the Identity, and each further line is a ShardRecord."""
KEYS = {"identity", "source", "text_field", "source_shards", "duplicates", "records"}
"""The keys of tokens.json except `checksum`"""
UNFINISHED = ".unfinished"  # a killed command leaves such a file, and the next command overwrites it
AGAIN = "run `prepare.py tokens` again with the same arguments"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Holds source, tokenizer and settings of a folder. Folders with equal identities hold the same tokens."""

    format_version: int
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    max_bad_line_fraction: float
    max_document_bytes: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<i4")


def identity_of(manifest: Manifest, tokenizer: Tokenizer, reading: Reading) -> Identity:
    return Identity(
        FORMAT_VERSION,
        manifest.fingerprint,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eos_id,
        reading.max_bad_line_fraction,
        reading.max_document_bytes,
    )


@dataclass(frozen=True)
class ShardRecord:
    """Describes the two files of one shard."""

    path: str
    """The path of the shard, relative to the root of the source"""
    lines: int
    documents: int
    tokens: int
    """Number of tokens, with one EOS per document"""
    text_bytes: int
    tokens_sha256: str
    lines_sha256: str
    counters: dict[str, int] = field(default_factory=dict)
    """The counters from reading the source's shard, such as shards_read and shards_damaged"""
    faults: dict[str, int] = field(default_factory=dict)
    """Name of a fault -> number of lines left out. SHARD.lines stores the position of the name."""
    sources: dict[str, int] = field(default_factory=dict)
    """Name of a source -> number of documents. SHARD.lines stores the position of the name."""

    def was_bad(self) -> str:
        """Returns the counters of damage as text, or "" if the source's shard was intact."""
        return ", ".join(name for name in BAD_SHARDS if name in self.counters)

    def sizes_bytes(self, identity: Identity) -> dict[str, int]:
        """Returns suffix -> size of the file in bytes."""
        return {".tokens": self.tokens * identity.dtype.itemsize, ".lines": 8 * (4 * self.lines + 1)}


@dataclass(frozen=True)
class TokenFolder:
    """Holds an opened folder. `manifest` lists the shards of the source, and `records` has a record of each shard."""

    root: Path
    identity: Identity
    manifest: Manifest
    records: dict[str, ShardRecord]

    @classmethod
    def open(cls, root: str, pulse: Pulse | None = None) -> TokenFolder:
        """Read tokens.json and compare the size of every file. The first opening of a shard compares its checksums.

        Raises DataFault for a folder that is unfinished, damaged or of an unknown format version.
        """
        folder = cls.parse(Path(root))
        problems = list(folder.wrong_sizes(pulse or Pulse()))
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise DataFault(f"{problems[0]}{more}; {AGAIN}")
        tokens = sum(record.tokens for record in folder.records.values())
        logger.info(
            "%s holds tokens: %d shards, %d tokens of tokenizer %s..., memory-mapped; nothing is tokenized, sizes "
            "are checked, checksums at the first opening of each shard",
            root,
            len(folder.records),
            tokens,
            folder.identity.tokenizer_fingerprint[:12],
        )
        return folder

    @classmethod
    def parse(cls, root: Path) -> TokenFolder:
        """Parse tokens.json without reading other files."""
        path = root / MANIFEST_NAME
        if not path.is_file():
            raise DataFault(f"token folder {str(root)!r} is unfinished: it has no {MANIFEST_NAME}; {AGAIN}")
        try:
            content = orjson.loads(path.read_bytes())
            version = content["identity"]["format_version"]
            if version != FORMAT_VERSION:
                raise DataFault(
                    f"{path} has format version {version}, this program reads {FORMAT_VERSION}; write it again"
                )
            identity = Identity(**content["identity"])
            shards = tuple((str(name), int(size)) for name, size in content["source_shards"])
            text_field = str(content["text_field"])
            duplicates = tuple(str(name) for name in content["duplicates"])
            records = {record["path"]: ShardRecord(**record) for record in content["records"]}
            if content.pop("checksum") != checksum_of(content) or content.keys() != KEYS:
                raise ValueError("its checksum does not match its content")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataFault(f"{path} is damaged ({error!r}); delete it and {AGAIN}") from error
        manifest = Manifest(str(root), shards, text_field, duplicates)
        if manifest.fingerprint != identity.source_fingerprint or list(records) != [
            name for name, _ in shards
        ]:
            raise DataFault(f"{path} is damaged: its list of shards was changed; delete it and {AGAIN}")
        return cls(root, identity, manifest, records)

    def wrong_sizes(self, pulse: Pulse) -> Iterator[str]:
        for record in self.records.values():
            pulse.beat()
            yield from wrong_sizes(self.root, record, self.identity)

    @property
    def documents_by_source(self) -> dict[str, int]:
        """Returns source -> number of documents."""
        documents: Counter[str] = Counter()
        for record in self.records.values():
            documents.update(record.sources)
        return dict(documents)

    def check(self, tokenizer: Tokenizer, reading: Reading) -> None:
        """Raises DataFault if another tokenizer or other limits for bad text made the folder, or if `reading` refuses
        one of its shards."""
        if self.identity.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataFault(
                f"token folder {str(self.root)!r} was made by tokenizer {self.identity.tokenizer_fingerprint}: "
                f"{tokenizer.differs_from(self.identity.tokenizer_fingerprint)}, or prepare the tokens again"
            )
        if self.identity.eos_id != tokenizer.eos_id:
            raise DataFault(
                f"token folder {str(self.root)!r} ends documents with token {self.identity.eos_id}, but the EOS of "
                f"{tokenizer.path!r} is {tokenizer.eos_id}; set the same EOS token, or prepare the tokens again"
            )
        if self.manifest.duplicates and reading.on_bad_shard == "fail":
            raise DataFault(
                f"the source of token folder {str(self.root)!r} held {len(self.manifest.duplicates)} shards twice, "
                f"among them {self.manifest.duplicates[0]}; remove them there and prepare the tokens again"
                f"{reading.or_skip}"
            )
        bad = [record for record in self.records.values() if record.was_bad()]
        if bad and reading.on_bad_shard == "fail":
            raise DataFault(
                f"shard {bad[0].path} of token folder {str(self.root)!r} was bad in the source ({bad[0].was_bad()}), "
                f"and {len(bad) - 1} more; restore them there and {AGAIN}{reading.or_skip}"
            )
        for name in ("max_bad_line_fraction", "max_document_bytes"):
            made_with, wanted = getattr(self.identity, name), getattr(reading, name)
            if made_with != wanted:
                raise DataFault(
                    f"token folder {str(self.root)!r} was made with {name}={made_with}, this run has {wanted}, so "
                    f"other documents may be left out; set {name}={made_with}, or prepare the tokens again"
                )


class TokenReader:
    """Returns the documents of a TokenFolder from memory-mapped files, by the run's policy for faults of text."""

    def __init__(
        self,
        folder: TokenFolder,
        tokenizer: Tokenizer,
        reading: Reading,
    ) -> None:
        folder.check(tokenizer, reading)
        self.folder, self.reading = folder, reading
        self._checked: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        return self.folder.manifest

    def open(self, relpath: str, part: int, parts: int, counters: Counter[str]) -> ShardLines:
        """Open lines of a shard (see ShardReader.open). A file that differs from its record always raises DataFault."""
        record, root, identity = self.folder.records[relpath], self.folder.root, self.folder.identity

        def mapped(pulse: Pulse) -> tuple[AnyTokens, LinesTable]:
            if relpath not in self._checked:
                problem = next(problems(root, record, identity, pulse), None)
                if problem:
                    raise DataFault(f"{problem}; {AGAIN}")
                self._checked.add(relpath)
            return map_shard(root, record, identity)

        try:
            tokens, table = patiently(mapped, f"tokens of shard {relpath}", self.reading, counters)
        except OSError as error:
            raise DataFault(
                f"the tokens of shard {relpath} in {str(root)!r} cannot be read ({error!r})"
            ) from error
        counters.update(record.counters)
        return _MappedLines(tokens, table, record, part, parts)


class _MappedLines:
    def __init__(
        self, tokens: AnyTokens, table: LinesTable, record: ShardRecord, part: int, parts: int
    ) -> None:
        self._tokens = tokens
        self._fault_names = list(record.faults)
        self._source_names = list(record.sources) or [NO_SOURCE]
        # Items of a memoryview are plain int, which are faster to read. The part is copied, so that a lane does not
        # keep the table of the whole shard.
        columns = table.offsets[:-1], table.offsets[1:], table.text_bytes, table.faults, table.sources
        self._begins, self._ends, self._text_bytes, self._faults, self._sources = (
            np.ascontiguousarray(column[part::parts]).data for column in columns
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int, /) -> EncodedDocument | str:
        fault = self._faults[place]
        if fault:
            return self._fault_names[fault - 1]
        return EncodedDocument(
            self._tokens[self._begins[place] : self._ends[place]],
            self._text_bytes[place],
            self._source_names[self._sources[place]],
        )

    def sources(self) -> LineSources:
        return LineSources(self._source_names, np.asarray(self._sources))


@dataclass(frozen=True)
class LinesTable:
    """Holds the content of SHARD.lines."""

    offsets: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    faults: NDArray[np.int64]
    sources: NDArray[np.int64]


def checksum_of(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of the content of tokens.json."""
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def shard_file(root: Path, relpath: str, suffix: str) -> Path:
    return root / f"{relpath}{suffix}"


def map_shard(root: Path, record: ShardRecord, identity: Identity) -> tuple[AnyTokens, LinesTable]:
    """Returns the memory-mapped ids [tokens], and the table of lines in memory. The caller checks the sizes."""
    table = np.fromfile(shard_file(root, record.path, ".lines"), "<i8")
    lines, dtype = record.lines, identity.dtype
    text_bytes, faults, sources = (
        table[begin : begin + lines] for begin in (k * lines + 1 for k in (1, 2, 3))
    )
    split = LinesTable(table[: lines + 1], text_bytes, faults, sources)
    if record.tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype), split
    # Return a plain array over the map, because slices of np.memmap are ten times slower.
    return np.asarray(np.memmap(shard_file(root, record.path, ".tokens"), dtype, "r")), split


def wrong_sizes(root: Path, record: ShardRecord, identity: Identity) -> Iterator[str]:
    for suffix, expected in record.sizes_bytes(identity).items():
        path = shard_file(root, record.path, suffix)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            yield f"{path} is missing"
            continue
        if size != expected:
            yield f"{path} has {size} bytes where {MANIFEST_NAME} says {expected}"


def problems(
    root: Path, record: ShardRecord, identity: Identity, pulse: Pulse | None = None
) -> Iterator[str]:
    """Read the two files of one shard, and yield problems of sizes, checksums, ids and offsets."""
    sizes = list(wrong_sizes(root, record, identity))
    if sizes:
        yield from sizes
        return
    tokens, table = map_shard(root, record, identity)
    for suffix, expected in ((".tokens", record.tokens_sha256), (".lines", record.lines_sha256)):
        path = shard_file(root, record.path, suffix)
        content = tokens if suffix == ".tokens" else np.fromfile(path, np.uint8)
        found = _sha256(content.view(np.uint8), pulse or Pulse())
        if found != expected:
            yield f"{path} is damaged: its sha256 is {found}, {MANIFEST_NAME} says {expected}"
            return
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < identity.vocab_size:
        yield (
            f"{shard_file(root, record.path, '.tokens')} holds ids from {tokens.min()} to {tokens.max()}, the "
            f"vocabulary ends at {identity.vocab_size - 1}"
        )
    lengths = np.diff(table.offsets)
    whole = table.offsets[0] == 0 and table.offsets[-1] == record.tokens and (lengths >= 0).all()
    if not whole or table.faults.min(initial=0) < 0 or table.faults.max(initial=0) > len(record.faults):
        yield f"{shard_file(root, record.path, '.lines')} has offsets or faults out of range"
    elif ((table.sources < 0) != (table.faults > 0)).any() or table.sources.max(initial=-1) >= len(
        record.sources
    ):
        yield f"{shard_file(root, record.path, '.lines')} has sources out of range"


def _sha256(content: NDArray[np.uint8], pulse: Pulse) -> str:
    digest = hashlib.sha256()
    for begin in range(0, len(content), PIECE_BYTES):
        digest.update(content[begin : begin + PIECE_BYTES].data)
        pulse.beat()
    return digest.hexdigest()
