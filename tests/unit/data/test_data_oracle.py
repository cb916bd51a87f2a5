"""Compares random corpora and random runs, with or without failing shards, with an oracle on lists.

The test compares every token, position and count. Each run has several starts, which differ in the number of ranks, the
source weights and the sequence length. Some corpora are unusual. They have shards without lines, lines without text,
documents without tokens, documents longer than ten sequences, fewer documents than lanes, or epochs of a few blocks.
"""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gsa_data.best_fit import MIN_POOL_BLOCKS
from gsa_data.corpus import open_corpus
from gsa_data.faults import DataFault, Reading
from gsa_data.lanes import stable_hash
from gsa_data.pack import FILLER
from gsa_data.shards import Manifest
from gsa_data.source_weights import LEFT_OUT_OF, NO_SOURCE, TOKENS_OF
from gsa_data.stream import BlockStream, merge_states
from gsa_data.stream_config import StreamConfig

EOS = 1
MOST_COPIES = 6
READING = Reading("skip", max_bad_line_fraction=1.0)
WEIGHTS: list[dict[str, float]] = [
    {}, {}, {"A": 2.0}, {"A": 0.0, "B": 0.5}, {"B": 3.3, "C": 1.0}, {NO_SOURCE: 0.3, "C": 5.5}
]  # fmt: skip


class Numbers:
    """Tokenizes texts that are token numbers."""

    path, fingerprint, eos_id, vocab_size = "numbers", "numbers", EOS, 70_000

    def differs_from(self, fingerprint: str) -> str:
        return "" if fingerprint == self.fingerprint else "other numbers"

    def encode(self, text: str | bytes) -> np.ndarray:
        words = (text.decode() if isinstance(text, bytes) else text).split()
        return np.array([int(word) for word in words if word != "."], np.int32)


NUMBERS: Any = Numbers()


class Document(NamedTuple):
    tokens: list[int]  # with the EOS
    source: str


Slot = tuple[int, int, int, int]
"""Epoch, unit, document, copy."""
Lines = dict[str, list[Document | str]]
"""Lines of each shard; a str is a fault."""


def write_text(folder: Path, chance: random.Random) -> Lines:
    """Write up to 4 shards of up to 40 lines. Documents share no token except the EOS."""
    shards: Lines = {}
    numbers = itertools.count(2)
    for shard in range(chance.choice([1, 2, 4])):
        text, lines = [], []
        for _ in range(chance.choice([0, 1, 2, 5, 20, 40])):
            kind, source = chance.random(), chance.choice(["A", "B", "C", ""])
            if kind < 0.1:
                text.append("{" if kind < 0.05 else "  ")
                lines.append("bad_json" if kind < 0.05 else "empty_text")
                continue
            tokens = list(itertools.islice(numbers, chance.choice([0, 1, 2, 3, 8, 15, 40, 200])))
            record = {"text": " ".join(map(str, [*tokens, "."])), "meta": {"redpajama_set_name": source}}
            text.append(json.dumps(record))
            lines.append(Document([*tokens, EOS], source or NO_SOURCE))
        name = f"part {shard % 2}/s {shard}.jsonl"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(text) + "\n" * chance.randrange(2) * bool(text))
        shards[name] = lines
    return shards


class Failed(NamedTuple):
    """Describes a shard that is gone, or has lost its end."""

    lines: list[Document | str]
    is_gone: bool = False


def fail(folder: Path, name: str, lines: list[Document | str], chance: random.Random) -> Failed:
    """Damage a shard so that it no longer opens, or ends after or within a line."""
    path = folder / name
    if chance.random() < 0.3:
        path.unlink()
        return Failed([], is_gone=True)
    left = chance.randrange(len(lines))
    text = path.read_text().split("\n")[:left]
    if chance.random() < 0.5:
        path.write_text("".join(f"{line}\n" for line in text))
        return Failed(lines[:left])
    path.write_text("\n".join([*text, '{"text": "1']))
    return Failed([*lines[:left], "bad_json"])


def copies(config: StreamConfig, shard: str, line: int, weight: float, epoch: int) -> int:
    state = (stable_hash(config.seed, shard) + (line + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    own = ((state ^ state >> 31) >> 11) / 2**53
    return math.floor((epoch + 1) * weight + own) - math.floor(epoch * weight + own)


@dataclass
class Lane:
    """Simulates one lane of a run that never stops; the weights change when told."""

    number: int
    config: StreamConfig
    shards: Lines
    weights: dict[str, float] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    """Shards that this start finds changed."""
    counts: Counter[str] = field(default_factory=Counter)
    cursor: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 0, 0])
    blocks: int = 0
    stream: list[tuple[Slot, int, int]] = field(default_factory=list)
    """concatenate: (slot, offset, token) from the first token of the next block on."""
    pool: list[tuple[Slot, int, list[int]]] = field(default_factory=list)
    """best_fit: (slot, offset, remaining tokens)."""
    origin: dict[Slot, tuple[str, int, int]] = field(default_factory=dict)
    """Position of the text: shard, line, and lines of the unit when it was opened."""
    is_new: bool = False
    """Whether a start has not yet read a block."""

    def __post_init__(self) -> None:
        self.slots = self.all_slots()

    def start(self, weights: dict[str, float], failed: dict[str, Failed]) -> None:
        self.weights, self.failed, self.is_new = weights, failed, True

    def lines_of(self, name: str) -> list[Document | str]:
        return self.failed[name].lines if name in self.failed else self.shards[name]

    def line_at(self, name: str, number: int) -> Document | str:
        return self.lines_of(name)[number] if number < len(self.lines_of(name)) else "lost_lines"

    def read_again(self) -> None:
        """As a start does, read again the documents that were read but not completely put into blocks."""
        for slot in {slot for slot, *_ in (*self.stream, *self.pool)}:
            line = self.line_at(*self.origin[slot][:2])
            if isinstance(line, str):
                self.counts["lost_lines" if self.pool else line] += 1
                self.stream = [each for each in self.stream if each[0] != slot]
                self.pool = [each for each in self.pool if each[0] != slot]

    def all_slots(self) -> Iterator[tuple[Slot, tuple[str, int, int]]]:
        config = self.config
        parts = -(-4 * config.num_lanes // len(self.shards))
        for epoch in range(5000):
            units = [(name, part) for name in sorted(self.shards) for part in range(parts)]
            units.sort(key=lambda unit: stable_hash(config.seed, epoch, *unit))
            for place, (name, part) in enumerate(units[self.number :: config.num_lanes]):
                failed = self.failed.get(name)
                self.counts["shards_read"] += part == 0 and (failed is None or not failed.is_gone)
                self.counts["shards_damaged"] += part == 0 and failed is not None and not failed.is_gone
                self.counts["shards_missing"] += failed is not None and failed.is_gone
                order = range(len(self.lines_of(name)))[part::parts]
                if config.shuffle_documents:
                    chance = np.random.RandomState(stable_hash(config.seed, epoch, name, part) % 2**32)
                    order = [order[i] for i in chance.permutation(len(order))]
                n = len(order)
                for j, copy in itertools.product(range(n), range(MOST_COPIES)):
                    back = int([0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8][copy] * n)
                    yield (epoch, place, j, copy), (name, order[(j - back) % n], n)

    def next_document(self) -> tuple[Slot, list[int]]:
        for slot, (name, number, lines) in self.slots:
            line = self.line_at(name, number)
            if isinstance(line, str):
                self.counts[line] += slot[3] == 0
                continue
            weight = self.weights.get(line.source, 1.0)
            if copies(self.config, name, number, weight, slot[0]) > slot[3]:
                self.counts["documents"] += 1
                self.counts[f"{TOKENS_OF}{line.source}"] += len(line.tokens)
                self.origin[slot] = (name, number, lines)
                return slot, line.tokens
            if slot[3] == 0:
                self.counts[f"{LEFT_OUT_OF}{line.source}"] += 1
        raise AssertionError(f"lane {self.number} has no document")

    def next_block(self, length: int) -> list[int]:
        self.blocks += 1
        if self.is_new:
            self.read_again()
        self.is_new = False
        return self.cut(length) if self.config.packing == "concatenate" else self.fill(length + 1)

    def cut(self, length: int) -> list[int]:
        while len(self.stream) <= length:
            slot, tokens = self.next_document()
            self.stream += [(slot, offset, token) for offset, token in enumerate(tokens)]
        block = [token for _, _, token in self.stream[: length + 1]]
        del self.stream[:length]
        slot, offset, _ = self.stream[0]
        self.cursor = self.position(slot, offset)
        return block

    def fill(self, room: int) -> list[int]:
        wanted = min(self.blocks, self.config.packing_pool_documents)
        while len(self.pool) < wanted or sum(len(each[2]) for each in self.pool) < MIN_POOL_BLOCKS * room:
            slot, tokens = self.next_document()
            self.pool.append((slot, 0, tokens))
            self.cursor = self.position((*slot[:3], slot[3] + 1), 0, self.origin[slot][2])
        for at, (slot, offset, tokens) in enumerate(self.pool):
            if len(tokens) > room:
                self.pool[at] = (slot, offset + room - 1, tokens[room - 1 :])
                return tokens[:room]
        block = list(self.pool.pop(0)[2])
        while fitting := [each for each in self.pool if len(each[2]) <= room - len(block)]:
            best = max(fitting, key=lambda each: len(each[2]))
            self.pool.remove(best)
            block += best[2]
        return block + [FILLER] * (room - len(block))

    @property
    def waiting(self) -> list[list[int]]:
        return [self.position(slot, offset) for slot, offset, _ in self.pool]

    def position(self, slot: Slot, offset: int, lines: int = 0) -> list[int]:
        return [*slot[:3], offset, slot[3], lines or self.origin[slot][2]]


def read(
    corpus: Manifest, config: StreamConfig, ranks: int, steps: int, state: dict[str, Any] | None
) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Run one start: blocks by global sample number, and the final state as in a checkpoint."""
    streams = [BlockStream(corpus, NUMBERS, config, rank, ranks, state) for rank in range(ranks)]
    samples: dict[int, list[int]] = {}
    for per_rank in (1 + step % 3 for step in range(steps)):
        done = streams[0].consumed_samples
        for rank, stream in enumerate(streams):
            places = itertools.count(done + (rank - done) % ranks, ranks)
            samples |= zip(places, stream.next_blocks(per_rank).tolist(), strict=False)
    merged = merge_states([stream.local_state() for stream in streams])
    return samples, eval(repr(merged), {"__builtins__": {}})


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("seed", range(10))
def test_a_life_of_a_run(seed: int, packing: Any, tmp_path: Path) -> None:
    refusals, _ = live(seed, packing, tmp_path, starts=4, shards_fail=False)
    assert len(refusals) <= 2
    assert all("no usable document" in refusal for refusal in refusals)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_lives_whose_shards_fail_between_a_save_and_a_resume(packing: Any, tmp_path: Path) -> None:
    """Remaining lines come as they would have, and each missing line is counted."""
    counts: Counter[str] = Counter()
    for seed in range(8):
        (tmp_path / str(seed)).mkdir()
        counts += live(seed, packing, tmp_path / str(seed), starts=6, shards_fail=True)[1]
    assert min(counts[name] for name in ("lost_lines", "shards_missing", "shards_damaged")) > 5


def live(
    seed: int, packing: Any, scratch: Path, starts: int, shards_fail: bool
) -> tuple[list[str], Counter[str]]:
    """Compare every block, position and count of a run; return the rejected starts, and the last counts."""
    chance = random.Random(seed)
    shards: Lines = {}
    while sum(isinstance(line, Document) for lines in shards.values() for line in lines) < 12:
        shards = write_text(scratch / f"text {len(list(scratch.iterdir()))}", chance)
        folder = max(scratch.iterdir())
    kept = {name: (folder / name).read_bytes() for name in shards}
    corpus = open_corpus(str(folder), reading=READING)
    num_lanes = chance.choice([1, 2, 4])
    config = StreamConfig(
        16,
        num_lanes,
        seed,
        shuffle_documents=seed % 3 > 0,
        packing=packing,
        packing_pool_documents=1 + seed,
        reading=READING,
    )
    lanes = [Lane(number, config, shards) for number in range(num_lanes)]
    sources = {line.source for lines in shards.values() for line in lines if isinstance(line, Document)}
    state: dict[str, Any] | None = None
    refusals: list[str] = []
    counted: Counter[str] = Counter()
    for _ in range(starts):
        weights = {name: each for name, each in chance.choice(WEIGHTS).items() if name in sources}
        config = replace(config, source_weights=weights, seq_len_tokens=chance.choice([1, 7, 16, 16, 50]))
        ranks = chance.choice([1, 2, 3, 4, 6])  # also more than lanes, and numbers that do not divide them
        failed: dict[str, Failed] = {}
        for name, content in kept.items():
            (folder / name).write_bytes(content)
            if shards_fail and shards[name] and chance.random() < 0.5:
                failed[name] = fail(folder, name, shards[name], chance)
        try:
            samples, state = read(corpus, config, ranks, chance.randrange(12), state)
        except DataFault as fault:
            refusals.append(str(fault))
            continue
        for lane in lanes:
            lane.start(weights, failed)
        for number, block in sorted(samples.items()):
            assert block == lanes[number % num_lanes].next_block(config.seq_len_tokens), f"sample {number}"
        assert state["cursors"] == [lane.cursor for lane in lanes]
        assert state["pools"] == [lane.waiting for lane in lanes]
        counted = sum((lane.counts for lane in lanes), Counter())
        names = ("documents", "bad_json", "empty_text", "lost_lines", "shards_", TOKENS_OF, LEFT_OUT_OF)
        assert counted == {name: count for name, count in state["counters"].items() if name.startswith(names)}
    return refusals, counted
