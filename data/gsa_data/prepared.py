"""Read and check NAME.prepared.json, the record that `prepare.py tokens` writes beside NAME.bin and NAME.idx.

megatron-core's format names no tokenizer and has no checksum. The record adds the fingerprint of the tokenizer and a
checksum of the dataset. Datasets that other programs wrote have no record.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from gsa_data.faults import BAD_SHARDS, DataFault, Reading
from gsa_data.fetch import PIECE_BYTES, Pulse
from gsa_data.tokenize import Tokenizer

RECORD = ".prepared.json"
AGAIN = "run `prepare.py tokens` again with the same arguments"


@dataclass(frozen=True)
class Origin:
    """Holds text, tokenizer and limits of all datasets of one command. Equal origins give equal tokens."""

    text: str
    """The fingerprint of the text's shards"""
    shards: int
    """Number of shards of the text, which is the number of datasets"""
    tokenizer: str
    """The fingerprint of the tokenizer"""
    max_bad_line_fraction: float
    max_document_bytes: int


@dataclass(frozen=True)
class Record:
    origin: Origin
    shard: str
    """The path of the shard, relative to the root of the text"""
    left_out: dict[str, int]
    """Name of a fault (faults.py) -> number of lines left out, or of bad shards"""
    sha256: str = ""
    """The SHA-256 of this record without this field, followed by NAME.bin and NAME.idx"""

    @property
    def was_bad(self) -> bool:
        return any(name in self.left_out for name in BAD_SHARDS)

    def content(self) -> bytes:
        return orjson.dumps(dataclasses.asdict(self), option=orjson.OPT_INDENT_2)


def read_record(dataset: str) -> Record | None:
    """Returns the record of a dataset (a path without ending), or None if it has none. Raises DataFault for damage."""
    path = Path(f"{dataset}{RECORD}")
    try:
        content = orjson.loads(path.read_bytes())
        return Record(Origin(**content.pop("origin")), **content)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataFault(f"{path} is damaged ({error!r}); delete it and {AGAIN}") from error


def sha256_of(record: Record, files: list[Path], pulse: Pulse | None = None) -> str:
    """Returns the hash of a record and its .bin and .idx. The files are read whole."""
    digest = hashlib.sha256(dataclasses.replace(record, sha256="").content())
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                if pulse is not None:
                    pulse.beat()
    return digest.hexdigest()


def problem_of(dataset: str, record: Record, pulse: Pulse | None = None) -> str:
    """Returns an error text if a dataset differs from its record, or ""."""
    files = [Path(f"{dataset}.bin"), Path(f"{dataset}.idx")]
    if sha256_of(record, files, pulse) == record.sha256:
        return ""
    return f"{dataset}.bin, its .idx or its {RECORD} is damaged: their SHA-256 is not {record.sha256}"


def check_complete(records: Mapping[str, Record], root: str) -> None:
    """Raises DataFault if a command has not finished, or a dataset is missing or was added."""
    for origin, datasets in Counter(record.origin for record in records.values()).items():
        if datasets != origin.shards:
            raise DataFault(
                f"{root!r} holds {datasets} prepared datasets of a text with {origin.shards} shards; {AGAIN}"
            )


def check_records(records: Mapping[str, Record], tokenizer: Tokenizer, reading: Reading, root: str) -> None:
    """Raises DataFault if another tokenizer made the tokens, or if `reading` refuses a shard of the text."""
    for name, record in records.items():
        folder = str(Path(root, name).parent)
        if record.origin.tokenizer != tokenizer.fingerprint:
            raise DataFault(
                f"the tokens in {folder!r} were made by tokenizer {record.origin.tokenizer}: "
                f"{tokenizer.differs_from(record.origin.tokenizer)}, or prepare the tokens again"
            )
        if record.was_bad and reading.on_bad_shard == "fail":
            raise DataFault(
                f"shard {record.shard} of the tokens in {folder!r} was bad in the text ({record.left_out}); restore it "
                f"there and {AGAIN}{reading.or_skip}"
            )
