"""Define the interface of shard readers, which return the lines of one shard as tokens.

There are three readers. TextReader tokenizes shards of text. ChatReader (chat.py) tokenizes conversations.
IndexedReader (indexed.py) memory-maps datasets in megatron-core's format, which `prepare.py tokens` can write. The
lanes, the packing and the stream use only the interface.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from gsa_data.documents import Document, read_documents
from gsa_data.faults import Reading
from gsa_data.pack import AnyTokens
from gsa_data.shards import Manifest
from gsa_data.source_weights import NO_SOURCE, LineSources
from gsa_data.tokenize import Tokenizer


class EncodedDocument(NamedTuple):
    tokens: AnyTokens  # with the EOS
    text_bytes: int  # 0 if only tokens are known
    source: str = NO_SOURCE


class ShardLines(Protocol):
    """Sequence of the lines of one shard. An item is a tokenized document, or for a bad line, the name of the fault. A
    document is tokenized when its item is accessed."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> EncodedDocument | str: ...

    def sources(self) -> LineSources:
        """Returns the sources of all lines, without encoding any."""
        ...


class ShardReader(Protocol):
    """Opens the shards of one corpus. Can be pickled into data workers."""

    @property
    def manifest(self) -> Manifest:
        """Returns the shards and the fingerprint that define the order."""
        ...

    def open(self, relpath: str, part: int, parts: int, counters: Counter[str]) -> ShardLines:
        """Open the lines [part::parts] of a shard.

        `counters` counts the faults of the whole shard, even if only some of its lines are opened (see
        documents.read_documents). Raises DataFault for a bad shard that is not to be skipped.
        """
        ...


@dataclass(frozen=True)
class TextReader:
    """Tokenizes shards of text while reading."""

    manifest: Manifest
    tokenizer: Tokenizer
    reading: Reading

    def open(self, relpath: str, part: int, parts: int, counters: Counter[str]) -> ShardLines:
        lines = read_documents(self.manifest, relpath, self.reading, counters)
        return TextLines(lines[part::parts], self.tokenizer)


class TextLines:
    """Holds the documents of one shard, which are tokenized on access."""

    def __init__(self, lines: list[Document | str], tokenizer: Tokenizer) -> None:
        self._lines = lines
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int, /) -> EncodedDocument | str:
        line = self._lines[place]
        if isinstance(line, str):
            return line
        tokens = np.append(self._tokenizer.encode(line.text_utf8), np.int32(self._tokenizer.eos_id))
        return EncodedDocument(tokens, len(line.text_utf8), line.source or NO_SOURCE)

    def sources(self) -> LineSources:
        number_of: dict[str, int] = {}
        index = np.full(len(self._lines), -1, np.int64)
        for place, line in enumerate(self._lines):
            if not isinstance(line, str):
                index[place] = number_of.setdefault(line.source or NO_SOURCE, len(number_of))
        return LineSources(list(number_of), index)
