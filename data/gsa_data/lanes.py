"""The lanes: the fixed order in which a corpus is read.

A run has `num_lanes` endless token streams. Every shard is cut into `parts`; a (shard, part) is a unit.
Each epoch orders all units by a hash of (seed, epoch, unit) and deals them to the lanes; a lane reads its
units one after another and permutes the documents inside each. So the order depends on nothing but the
manifest, the seed, the number of lanes and the tokenizer: never on ranks, workers or prefetch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gsa_data.pack import LANE_START, AnyTokens, Cursor
from gsa_data.reader import ShardLines, ShardReader
from gsa_data.shards import DataFault

ORDER_VERSION = 1  # raise it with any change to the order below: saved cursors then no longer fit

# A lane with few units wraps early or late (lanes of 2 and 3 shards: a third apart), so small corpora are cut
# finer. The price is reading each shard once per part; large corpora have parts = 1.
MIN_UNITS_PER_LANE = 4

# With shards skipped, a lane may be dealt only lost ones in some epoch. This often in a row is no accident.
MAX_EMPTY_EPOCHS = 3


class Unit(NamedTuple):
    relpath: str
    part: int


class LaneReader:
    """Reads any of the lanes of one corpus. `counters` grows with what was read and what was left out."""

    def __init__(
        self,
        reader: ShardReader,
        num_lanes: int,
        seed: int,
        shuffle_documents: bool,
    ) -> None:
        self.reader = reader
        self.num_lanes = num_lanes
        self.seed = seed
        self.shuffle_documents = shuffle_documents
        self.parts = -(-num_lanes * MIN_UNITS_PER_LANE // len(reader.manifest.shards))
        self.counters: Counter[str] = Counter()
        self._units_of_epoch: dict[int, list[Unit]] = {}

    def pieces(self, lane: int, start: Cursor = LANE_START) -> Iterator[tuple[Cursor, AnyTokens]]:
        """The documents of one lane from `start` on, tokenized and with their EOS, for ever.

        Counters never count anything twice across a resume: a cursor other than LANE_START points into a
        document that was counted before it was saved.
        """
        epoch, unit, document, token_offset = start
        resumed = start != LANE_START
        found_any, empty_epochs = resumed, 0
        while True:
            units = self.units(epoch)[lane :: self.num_lanes]
            while unit < len(units):
                lines, order = self._open(units[unit], epoch, resumed)
                while document < len(order):
                    line = lines[order[document]]
                    if isinstance(line, str):
                        self.counters[line] += 1
                    else:
                        found_any = True
                        if not resumed:
                            self.counters["documents"] += 1
                            self.counters["text_bytes"] += line.text_bytes
                        yield Cursor(epoch, unit, document, token_offset), line.tokens[token_offset:]
                        resumed, token_offset = False, 0
                    document += 1
                # Also when the shard lost the cursor's document: the next unit then starts at its beginning.
                resumed, token_offset = False, 0
                unit, document = unit + 1, 0
            empty_epochs = 0 if found_any else empty_epochs + 1
            if empty_epochs == MAX_EMPTY_EPOCHS:
                raise DataFault(
                    f"lane {lane} of {self.num_lanes} found no usable document in {empty_epochs} epochs of "
                    f"{self.reader.manifest.root!r}; use fewer lanes or more data"
                )
            epoch, unit, found_any = epoch + 1, 0, False

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken, self.counters = dict(self.counters), Counter()
        return taken

    def units(self, epoch: int) -> list[Unit]:
        """All units in the order of one epoch; lane v reads every num_lanes-th of them, from v on."""
        if epoch not in self._units_of_epoch:
            shards = self.reader.manifest.shards
            units = [Unit(relpath, part) for relpath, _ in shards for part in range(self.parts)]
            units.sort(key=lambda unit: stable_hash(self.seed, epoch, *unit))
            # Lanes of one process are in neighbouring epochs, so older orders are not needed again.
            self._units_of_epoch = {e: o for e, o in self._units_of_epoch.items() if e >= epoch - 1}
            self._units_of_epoch[epoch] = units
        return self._units_of_epoch[epoch]

    def _open(self, unit: Unit, epoch: int, counted: bool) -> tuple[ShardLines, Sequence[int]]:
        """The lines of one unit, and the order in which to take them."""
        counters: Counter[str] = Counter()
        lines = self.reader.open(unit.relpath, unit.part, self.parts, counters)
        if counted or unit.part != 0:  # a shard counts once, but its retries happened
            counters = Counter(read_retries=counters["read_retries"])
        self.counters += counters
        if not self.shuffle_documents:
            return lines, range(len(lines))
        # RandomState, as numpy froze its stream; Generator's may change between numpy versions.
        rng = np.random.RandomState(stable_hash(self.seed, epoch, *unit) % 2**32)
        return lines, rng.permutation(len(lines)).data  # a memoryview: its items are plain int


def stable_hash(*parts: object) -> int:
    """64 bits from the given values, the same on every machine and Python version."""
    key = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
