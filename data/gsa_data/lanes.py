"""Read a corpus in lanes, which fix its order.

A run has `num_lanes` endless token streams, the lanes. Every shard is cut into parts, called units. Each epoch sorts
all units by a hash of (seed, epoch, unit), and deals them to the lanes in turn. A lane reads its units one after
another, and permutes the documents in each unit.

The order of the text depends only on the list of shards, the seed, the number of lanes, the tokenizer and the source
weights (source_weights.py). Prefetch and the numbers of ranks and workers do not change the order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gsa_data.faults import FAILED_READINGS, LOST_LINES, DataFault, warn_once
from gsa_data.pack import LANE_START, AnyTokens, Cursor
from gsa_data.reader import EncodedDocument, ShardLines, ShardReader
from gsa_data.source_weights import (
    LEFT_OUT_OF,
    TOKENS_OF,
    LineSources,
    copies_in_epoch,
    document_offsets,
    most_copies,
    place_of_copy,
    weights_of_lines,
)
from gsa_data.stream_config import StreamConfig

ORDER_VERSION = 1  # raise it with any change to the order below, because saved cursors then no longer fit

# Lanes with few units (parts of shards) end their epochs far apart, so shards of small corpora are cut into more parts.
# To read a part, a lane reads the whole shard. Shards of large corpora have one part.
MIN_UNITS_PER_LANE = 4

# If each shard belongs to one source, so does each unit (part of a shard). Many small units then keep the mixture of
# sources the same from batch to batch. The limit bounds the time and memory to order the units.
DOCUMENTS_PER_MIXED_UNIT = 64
MAX_MIXED_UNITS = 1 << 16

# If bad shards are skipped, an epoch may give a lane only bad shards. This number of such epochs in a row is an error.
MAX_EMPTY_EPOCHS = 3

# If all sources of a lane have small weights, many epochs have no document for it. After this number of such epochs in
# a row, the weights leave out nearly the whole corpus, which is an error.
MAX_IDLE_EPOCHS = 100

# By chance, a lane with few units (parts of shards) may get only sources of weight 0 in some epochs. This number of
# such units in a row cannot be chance.
MIN_LEFT_OUT_UNITS = MAX_IDLE_EPOCHS * MIN_UNITS_PER_LANE

LONG_CONVERSATIONS = "long_conversations"
"""Counter of conversations with more tokens than a sequence, which are cut"""


class Unit(NamedTuple):
    relpath: str
    part: int


@dataclass(frozen=True)
class Thinning:
    """Holds the effect of the source weights on the lines of one unit in one epoch."""

    sources: LineSources
    copies: Sequence[int]
    """[lines]"""
    most: int
    """Largest number of copies of a document"""
    has_any: bool
    """Whether any document has a weight above 0"""
    leaves_out_all: bool
    """Whether there are documents and all have weight 0"""


class OpenUnit(NamedTuple):
    lines: ShardLines
    order: Sequence[int]
    """The order of all lines that the unit had when the lane first opened the unit"""
    thinning: Thinning | None

    def is_lost(self, line: int) -> bool:
        """Returns whether a line is lost, because its shard became unreadable or shorter between a save and a resume.
        The other lines keep their index."""
        return line >= len(self.lines)

    def line_at(self, document: int, copy: int) -> int:
        """Returns the line at the slot (document, copy), see source_weights.py."""
        if copy == 0:
            return self.order[document]
        number = len(self.order)
        return self.order[(document - int(place_of_copy(copy) * number)) % number]

    def slots(self, document: int, copy: int, first_in_any_case: bool) -> Iterator[tuple[int, int]]:
        """Yields all slots (document, copy number) in reading order, from the given slot on. With `first_in_any_case`,
        the given slot is yielded even if the current source weights no longer allow it."""
        most = self.thinning.most if self.thinning else 1
        if first_in_any_case and document < len(self.order):
            yield document, copy
            copy += 1
        for later_copy in range(copy, most if document < len(self.order) else 0):
            yield document, later_copy
        for later in range(document + 1, len(self.order)):
            for each in range(most):
                yield later, each


class LaneReader:
    """Reads the lanes of one corpus. `counters` counts what was read and what was left out."""

    def __init__(self, reader: ShardReader, config: StreamConfig) -> None:
        self.reader, self.config = reader, config
        mixed_units = min(reader.manifest.mixed_documents // DOCUMENTS_PER_MIXED_UNIT, MAX_MIXED_UNITS)
        units = max(config.num_lanes * MIN_UNITS_PER_LANE, mixed_units)
        self.parts = -(-units // len(reader.manifest.shards))
        self.counters: Counter[str] = Counter()
        self._units_of_epoch: dict[int, list[Unit]] = {}

    def pieces(
        self, lane: int, start: Cursor = LANE_START, begun: bool = True
    ) -> Iterator[tuple[Cursor, AnyTokens]]:
        """Yields the documents of one lane from `start` on, tokenized and with their EOS, endlessly.

        Counters count nothing twice across a resume.

        Args:
            begun: whether the document at `start` was begun and counted before the save. If so, its rest comes first,
                even if its source now has weight 0.
        """
        epoch, unit, document, token_offset, copy, known_lines = start
        resumed = start != LANE_START
        begun = begun and resumed
        found_any, taken_any, empty_epochs, idle_epochs, left_out_units = resumed, resumed, 0, 0, 0
        while True:
            units = self.units(epoch)[lane :: self.config.num_lanes]
            while unit < len(units):
                opened = self._open(units[unit], epoch, resumed, known_lines)
                thinning = opened.thinning
                found_any = found_any or (thinning is not None and thinning.has_any)
                left_out_units += thinning is not None and thinning.leaves_out_all
                for place, number in opened.slots(document, copy, begun):
                    line_number = opened.line_at(place, number)
                    if opened.is_lost(line_number):
                        if number == 0 or begun:
                            self.counters[LOST_LINES] += 1
                        begun, token_offset = False, 0
                        continue
                    if thinning is not None and thinning.copies[line_number] <= number and not begun:
                        if number == 0:
                            source = thinning.sources.names[thinning.sources.of_line[line_number]]
                            self.counters[f"{LEFT_OUT_OF}{source}"] += 1
                        continue
                    line = opened.lines[line_number]
                    if isinstance(line, str):
                        if number == 0 or begun:
                            self.counters[line] += 1
                    else:
                        found_any = taken_any = True
                        if not begun:
                            self._count(line)
                        cursor = Cursor(epoch, unit, place, token_offset, number, len(opened.order))
                        yield cursor, line.tokens[token_offset:]
                    begun, token_offset = False, 0
                # If the shard lost the cursor's document, the next unit starts at its beginning, too.
                resumed, begun, token_offset = False, False, 0
                unit, document, copy, known_lines = unit + 1, 0, 0, 0
            empty_epochs = 0 if found_any else empty_epochs + 1
            idle_epochs = 0 if taken_any else idle_epochs + 1
            left_out_units = 0 if found_any else left_out_units
            may_be_chance = 0 < left_out_units < MIN_LEFT_OUT_UNITS
            if idle_epochs >= MAX_IDLE_EPOCHS or (empty_epochs >= MAX_EMPTY_EPOCHS and not may_be_chance):
                weights = self.config.source_weights
                said = f" with source_weights {dict(weights)}" if weights else ""
                raise DataFault(
                    f"lane {lane} of {self.config.num_lanes} found no usable document in {idle_epochs} epochs of "
                    f"{self.reader.manifest.root!r}{said}; use fewer lanes or more data"
                    f"{' or larger weights' if weights else ''}"
                )
            epoch, unit, found_any, taken_any = epoch + 1, 0, False, False

    def read_again(self, lane: int, cursors: Iterable[Cursor]) -> Iterator[tuple[Cursor, AnyTokens]]:
        """Yields documents that were counted before, each from its cursor to its end. A missing document is lost."""
        opened_at: tuple[int, int] | None = None
        for cursor in cursors:
            if opened_at != (cursor.epoch, cursor.unit):
                unit = self.units(cursor.epoch)[lane :: self.config.num_lanes][cursor.unit]
                opened = self._open(unit, cursor.epoch, True, cursor.lines)
                opened_at = (cursor.epoch, cursor.unit)
            line: EncodedDocument | str = "missing"
            if cursor.document < len(opened.order):
                line_number = opened.line_at(cursor.document, cursor.copy)
                line = "missing" if opened.is_lost(line_number) else opened.lines[line_number]
            if isinstance(line, str):
                warn_once(f"lane {lane}: document {tuple(cursor)}, waiting for its block, is gone ({line})")
                self.counters[LOST_LINES] += 1
            else:
                yield cursor, line.tokens[cursor.token_offset :]

    def _count(self, document: EncodedDocument) -> None:
        self.counters["documents"] += 1
        self.counters["text_bytes"] += document.text_bytes
        self.counters[f"{TOKENS_OF}{document.source}"] += len(document.tokens)
        if self.reader.manifest.is_chat and len(document.tokens) > self.config.seq_len_tokens + 1:
            self.counters[LONG_CONVERSATIONS] += 1

    def take_counters(self) -> dict[str, int]:
        taken, self.counters = dict(self.counters), Counter()
        return taken

    def units(self, epoch: int) -> list[Unit]:
        """Returns all units in the order of one epoch. Lane v reads every num_lanes-th unit, starting at v."""
        if epoch not in self._units_of_epoch:
            shards = self.reader.manifest.shards
            units = [Unit(relpath, part) for relpath, _ in shards for part in range(self.parts)]
            units.sort(key=lambda unit: stable_hash(self.config.seed, epoch, *unit))
            # Lanes of one process are in neighbouring epochs, so drop older orders.
            self._units_of_epoch = {e: o for e, o in self._units_of_epoch.items() if e >= epoch - 1}
            self._units_of_epoch[epoch] = units
        return self._units_of_epoch[epoch]

    def _open(self, unit: Unit, epoch: int, counted: bool, known_lines: int = 0) -> OpenUnit:
        """Return the unit's lines, their order, and their numbers of copies.

        Args:
            counted: whether the saved counters already include the unit
            known_lines: number of lines of the unit at the save; 0 if unknown
        """
        counters: Counter[str] = Counter()
        lines = self.reader.open(unit.relpath, unit.part, self.parts, counters)
        if counted or unit.part != 0:  # a shard counts once, but each failed reading counts
            failed = () if counted else FAILED_READINGS
            counters = Counter({name: counters[name] for name in ("read_retries", *failed)})
        self.counters += counters
        num_lines = known_lines or len(lines)
        if len(lines) < num_lines:
            warn_once(
                f"shard {unit.relpath}: {num_lines - len(lines)} of the {num_lines} lines that part {unit.part} had "
                "before the resume are gone and left out"
            )
        thinning = self._thin(lines, unit, epoch) if self.config.source_weights else None
        if not self.config.shuffle_documents:
            return OpenUnit(lines, range(num_lines), thinning)
        # numpy has frozen the stream of RandomState. Generator's stream may change between versions.
        rng = np.random.RandomState(stable_hash(self.config.seed, epoch, *unit) % 2**32)
        order = rng.permutation(num_lines).data  # a memoryview: its items are plain int
        return OpenUnit(lines, order, thinning)

    def _thin(self, lines: ShardLines, unit: Unit, epoch: int) -> Thinning:
        sources = lines.sources()
        weights = weights_of_lines(sources, self.config.source_weights)
        places_in_shard = unit.part + self.parts * np.arange(len(lines), dtype=np.int64)
        offsets = document_offsets(stable_hash(self.config.seed, unit.relpath), places_in_shard)
        is_document = sources.of_line >= 0
        has_any = bool((is_document & (weights > 0)).any())
        return Thinning(
            sources,
            copies_in_epoch(weights, offsets, epoch).data,
            most_copies(self.config.source_weights),
            has_any,
            leaves_out_all=bool(is_document.any()) and not has_any,
        )


def stable_hash(*parts: object) -> int:
    """Hash the given values to 64 bits, the same on every machine and Python version."""
    key = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
