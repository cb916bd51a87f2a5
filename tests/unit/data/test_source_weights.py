"""Weights of sources against an oracle that lists the documents of every lane one by one."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from data_corpus import Run, document, line, read_run, write_shard

from gsa_data import BlockStream, DataFault, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import open_corpus
from gsa_data.faults import Reading
from gsa_data.indexed import HEADER, MAGIC
from gsa_data.lanes import LaneReader, stable_hash
from gsa_data.prepare_tokens import check_tokens, prepare_tokens
from gsa_data.reader import TextReader
from gsa_data.source_weights import NO_SOURCE, copies_in_epoch, document_offsets, tokens_by_source
from gsa_data.token_files import MANIFEST_NAME, TokenFolder

L = 32
CONFIG = StreamConfig(
    L, num_lanes=12, seed=7, prefetch_blocks=24, source_weights={"Web": 0.3, "Books": 2.5, "Code": 0.0}
)
OTHERS: list[dict[str, float]] = [{"Web": 1.5, NO_SOURCE: 0.5}, {}, {"Code": 3.0, "Web": 0.0}]
NUM_SHARDS, PER_SHARD = 4, 60


def source_of(number: int) -> str:
    """Half of the documents are Web, a sixth each is Books, Code and without a source."""
    return ("Web", "Books", "Web", "Code", "Web", "")[number % 6]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    root = tmp_path_factory.mktemp("mixed")
    for shard in range(NUM_SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        lines = [line(document(number), source_of(number)) for number in numbers]
        write_shard(root / f"s{shard}.jsonl.zst", lines)
    return build_manifest(str(root))


@pytest.fixture(scope="module")
def tokens(mixed: Manifest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return prepare_tokens(mixed.root, tokenizer, tmp_path_factory.mktemp("tokens"), 1, Reading())


# The oracle: slots of a lane from the text of source_weights.py, in plain loops.

Slot = tuple[int, int, int, int]
"""epoch, unit, document, copy: what a cursor says, but for the offset."""


def copies_of(number: int, weight: float, epoch: int) -> int:
    key = stable_hash(CONFIG.seed, f"s{number // PER_SHARD}.jsonl.zst")
    state = (key + (number % PER_SHARD + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    own = ((state ^ state >> 31) >> 11) / 2**53
    return math.floor((epoch + 1) * weight + own) - math.floor(epoch * weight + own)


def lane_slots(manifest: Manifest, lane: int, epochs: int) -> list[tuple[Slot, int]]:
    """(slot, number of its document) of all slots with up to 3 copies, in order."""
    parts = CONFIG.num_lanes * 4 // NUM_SHARDS
    units = [(name, part) for name, _ in manifest.shards for part in range(parts)]
    found = []
    for epoch in range(epochs):
        ordered = sorted(units, key=lambda unit: stable_hash(CONFIG.seed, epoch, *unit))
        for place, (name, part) in enumerate(ordered[lane :: CONFIG.num_lanes]):
            numbers = range(int(name[1]) * PER_SHARD, (int(name[1]) + 1) * PER_SHARD)[part::parts]
            rng = np.random.RandomState(stable_hash(CONFIG.seed, epoch, name, part) % 2**32)
            order = [numbers[i] for i in rng.permutation(len(numbers))]
            half, quarter = len(order) // 2, len(order) // 4
            for j in range(len(order)):
                for copy, back in enumerate((0, half, quarter)):
                    found.append(((epoch, place, j, copy), order[j - back]))
    return found


def due(slot: Slot, number: int, weights: dict[str, float]) -> bool:
    return copies_of(number, weights.get(source_of(number) or NO_SOURCE, 1.0), slot[0]) > slot[3]


def lane_tokens(numbers: list[int], tokenizer: Tokenizer) -> list[int]:
    return [token for n in numbers for token in [*tokenizer.encode(document(n)).tolist(), tokenizer.eos_id]]


def blocks_of(run: Run, lane: int) -> list[list[int]]:
    return [run.samples[i] for i in sorted(run.samples) if i % CONFIG.num_lanes == lane]


@pytest.fixture(scope="module")
def reference(mixed: Manifest, tokenizer: Tokenizer) -> Run:
    return read_run(mixed, tokenizer, CONFIG, steps=30, global_batch_size=24)


def test_order_is_the_oracles(mixed: Manifest, tokenizer: Tokenizer, reference: Run) -> None:
    for lane in range(CONFIG.num_lanes):
        slots = lane_slots(mixed, lane, epochs=9)
        weights = dict(CONFIG.source_weights)
        expected = lane_tokens([number for slot, number in slots if due(slot, number, weights)], tokenizer)
        read = blocks_of(reference, lane)
        assert len(read) == 60
        assert read == [expected[at : at + L + 1] for at in range(0, 60 * L, L)]
    assert sum(cursor[0] >= 1 for cursor in reference.state()["cursors"]) > CONFIG.num_lanes / 2


@pytest.mark.parametrize(
    ("mapped", "world_size", "num_workers"), [(False, 4, 3), (True, 2, 1), (True, 4, 0), (False, 2, 0)]
)
def test_ranks_workers_and_tokens_change_nothing(
    mixed: Manifest,
    tokens: TokenFolder,
    tokenizer: Tokenizer,
    reference: Run,
    mapped: bool,
    world_size: int,
    num_workers: int,
) -> None:
    config = replace(CONFIG, num_workers=num_workers)
    run = read_run(tokens if mapped else mixed, tokenizer, config, world_size, 30, global_batch_size=24)
    assert run.samples == reference.samples
    assert run.state() == reference.state()  # counters of every source too


def test_weights_of_one_are_no_weights(mixed: Manifest, tokenizer: Tokenizer) -> None:
    ones = replace(CONFIG, source_weights={"Web": 1.0, NO_SOURCE: 1.0})
    runs = [read_run(mixed, tokenizer, config) for config in (ones, replace(CONFIG, source_weights={}))]
    assert runs[0].samples == runs[1].samples


@pytest.mark.parametrize("seed", range(4))
def test_weights_may_change_at_any_place(
    mixed: Manifest, tokens: TokenFolder, tokenizer: Tokenizer, seed: int
) -> None:
    """Before each place the old weights' documents, behind it the new ones': none lost, none repeated."""
    rng = random.Random(seed)
    all_weights = [dict(CONFIG.source_weights), *rng.sample(OTHERS, 3)]
    state: dict[str, Any] | None = None
    ends: list[list[list[int]]] = []
    samples: dict[int, list[int]] = {}
    for weights in all_weights:
        config = replace(CONFIG, source_weights=weights)
        run = Run(rng.choice([mixed, tokens]), tokenizer, config, rng.choice([1, 2, 4]), state)
        for _ in range(rng.randrange(3, 14)):
            run.step(rng.choice([4, 12, 24]))
        samples |= run.samples
        state = eval(repr(run.state()), {"__builtins__": {}})
        run.step(24)  # never saved
        run.close()
        ends.append(state["cursors"])
    assert state is not None
    assert sorted(samples) == list(range(state["consumed_samples"]))

    for lane in range(CONFIG.num_lanes):
        expected, last = [], (0, 0, 0, -1)
        for weights, cursors in zip(all_weights, ends, strict=True):
            epoch, unit, place, _, copy, _ = cursors[lane]  # in the last document of these weights
            until = (epoch, unit, place, copy)
            if until == (0, 0, 0, 0) and cursors[lane][3] == 0:
                continue  # this lane was not read yet
            slots = lane_slots(mixed, lane, epochs=epoch + 1)
            expected += [
                number for slot, number in slots if last < slot <= until and due(slot, number, weights)
            ]
            last = until
        stream = lane_tokens(expected, tokenizer)
        mine = [samples[i] for i in sorted(samples) if i % CONFIG.num_lanes == lane]
        assert mine == [stream[at : at + L + 1] for at in range(0, len(mine) * L, L)]
        # The stream ends with the document in which the lane stands.
        assert len(mine) * L < len(stream) or not mine


def test_a_position_saved_before_there_were_weights(mixed: Manifest, tokenizer: Tokenizer) -> None:
    plain = replace(CONFIG, source_weights={})
    whole, first = (read_run(mixed, tokenizer, plain, steps=steps) for steps in (8, 5))
    old = {
        key: value
        for key, value in first.state().items()
        if key not in ("pools", "packing", "packing_pool_documents", "source_weights")
    }
    old["cursors"] = [cursor[:4] for cursor in old["cursors"]]
    second = read_run(mixed, tokenizer, plain, steps=3, state=old)
    assert {**first.samples, **second.samples} == whole.samples
    assert second.state() == whole.state()


# Counts and mixture


def test_over_any_epochs_a_document_comes_as_often_as_its_weight_says() -> None:
    offsets = document_offsets(stable_hash("any"), np.arange(5000))
    assert 0 <= offsets.min() < 0.01 < 0.99 < offsets.max() < 1
    assert abs(offsets.mean() - 0.5) < 0.02
    for weight in (0.0, 0.1, 0.3, 1 / 3, 0.5, 1.0, 1.7, 2.0, 13.25):
        weights = np.full(5000, weight)
        counts = np.array([copies_in_epoch(weights, offsets, epoch) for epoch in range(40)])
        for first, last in ((0, 1), (0, 10), (3, 10), (0, 40)):
            total = counts[first:last].sum(0)
            expected = (last - first) * weight
            assert np.abs(total - expected).max() < 1 + 1e-9
            assert total.mean() == pytest.approx(expected, abs=0.03)


def test_measured_mixture_and_spread_copies(mixed: Manifest, tokenizer: Tokenizer) -> None:
    weights = {"Web": 0.3, "Books": 2.0, "Code": 0.0}
    reader = LaneReader(TextReader(mixed, tokenizer, Reading()), 1, 7, True, weights)
    assert reader.parts == 1  # units of 60 documents
    found: Counter[int] = Counter()
    places: dict[tuple[int, int, str], list[int]] = {}
    for at, (cursor, piece) in enumerate(reader.pieces(0)):
        if cursor.epoch == 10:
            break
        text = tokenizer.decode(piece[:-1])
        number = int(text[1 : text.index(">")])
        found[number] += 1
        places.setdefault((cursor.epoch, cursor.unit, text), []).append(at)
    for number in range(NUM_SHARDS * PER_SHARD):
        expected = {"Web": 3, "Books": 20, "Code": 0, "": 10}[source_of(number)]
        assert found[number] == expected
    gaps = [each[1] - each[0] for each in places.values() if len(each) == 2]
    assert len(gaps) == 10 * 40
    assert min(gaps) >= 8  # about 38 documents of a unit are taken, half of them lie between

    counted = tokens_by_source(reader.take_counters())
    assert list(counted) == ["Books", "Web", NO_SOURCE]
    lengths = [len(tokenizer.encode(document(number))) + 1 for number in range(NUM_SHARDS * PER_SHARD)]
    for source, times in (("Books", 20), ("Web", 3), ("", 10)):
        own = sum(length for number, length in enumerate(lengths) if source_of(number) == source)
        assert counted[source or NO_SOURCE] == pytest.approx(
            times * own, rel=0.01
        )  # and the 11th epoch's first


@pytest.mark.parametrize("num_lanes", [2, 8])
def test_a_lane_may_get_only_shards_of_weight_0_for_some_epochs(
    tokenizer: Tokenizer, tmp_path: Path, num_lanes: int
) -> None:
    for shard, source in enumerate(("Web", "Books", "Code", "Wiki")):
        numbers = range(12 * shard, 12 * (shard + 1))
        write_shard(tmp_path / f"s{shard}.jsonl.zst", [line(document(number), source) for number in numbers])
    corpus = build_manifest(str(tmp_path))
    config = replace(CONFIG, num_lanes=num_lanes, source_weights={"Web": 0.0, "Books": 0.0, "Code": 0.0})
    whole = read_run(corpus, tokenizer, config, steps=60)
    first = read_run(corpus, tokenizer, config, steps=19)
    rest = read_run(corpus, tokenizer, config, world_size=2, steps=41, state=first.state())
    assert {**first.samples, **rest.samples} == whole.samples
    assert rest.state() == whole.state()


# What is refused


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, 100.5])
def test_bad_weights(weight: float) -> None:
    with pytest.raises(ValueError, match=r"source_weights Web=.* must be between 0"):
        replace(CONFIG, source_weights={"Web": weight})


def with_weights(corpus: Any, tokenizer: Tokenizer, **weights: float) -> BlockStream:
    return BlockStream(corpus, tokenizer, replace(CONFIG, source_weights=weights), 0, 1)


def test_unknown_and_empty_sources(
    mixed: Manifest, tokens: TokenFolder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for shard in range(120):
        write_shard(tmp_path / f"s{shard}.jsonl.zst", [line(document(shard), "Web")])
    many_shards = build_manifest(str(tmp_path))
    with pytest.raises(DataFault, match=r"names 'Wbe', but the sources of .* are: Books, Code, Web, unknown"):
        with_weights(tokens, tokenizer, Wbe=0.5)
    nothing = {"Web": 0.0, "Books": 0.0, "Code": 0.0, NO_SOURCE: 0.0}
    with pytest.raises(DataFault, match="leaves out every source"):
        with_weights(tokens, tokenizer, **nothing)
    with pytest.raises(DataFault, match=r"no usable document in 100 epochs of .* with source_weights"):
        with_weights(mixed, tokenizer, **nothing).next_blocks(1)  # 4 units a lane
    one_lane = replace(CONFIG, num_lanes=1, source_weights=nothing)
    with pytest.raises(DataFault, match=r"no usable document in 4 epochs of .* with source_weights"):
        BlockStream(many_shards, tokenizer, one_lane, 0, 1).next_blocks(1)
    with pytest.raises(DataFault, match=r"no usable document in 100 epochs of .* larger weights"):
        with_weights(mixed, tokenizer, **dict.fromkeys(nothing, 1e-9)).next_blocks(1)


def test_tokens_without_sources(
    mixed: Manifest, tokens: TokenFolder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A folder of format version 1 is read as before, but not with weights."""
    for record in tokens.records.values():
        ids = (tokens.root / f"{record.path}.tokens").read_bytes()
        (tmp_path / f"{record.path}.tokens").write_bytes(ids)
        table = (tokens.root / f"{record.path}.lines").read_bytes()
        (tmp_path / f"{record.path}.lines").write_bytes(table[: 8 * (3 * record.lines + 1)])
    content = orjson.loads((tokens.root / MANIFEST_NAME).read_bytes())
    content["identity"]["format_version"] = 1
    del content["checksum"]
    for record in content["records"]:
        del record["sources"]
        lines = (tmp_path / f"{record['path']}.lines").read_bytes()
        record["lines_sha256"] = __import__("hashlib").sha256(lines).hexdigest()
    (tmp_path / MANIFEST_NAME).write_bytes(orjson.dumps(content))
    old = open_corpus(str(tmp_path))
    assert list(check_tokens(tmp_path, mixed.root, tokenizer)) == []
    plain = replace(CONFIG, source_weights={})
    runs = [read_run(corpus, tokenizer, plain) for corpus in (old, mixed)]
    assert runs[0].samples == runs[1].samples
    with pytest.raises(DataFault, match=r"does not know the sources .*format version 1.*prepare the tokens"):
        with_weights(old, tokenizer, Web=0.5)
    with pytest.raises(DataFault, match="format_version=1, this command has 2; give another --out"):
        prepare_tokens(mixed.root, tokenizer, tmp_path, 1, Reading())


def test_indexed_datasets_have_no_sources(tokenizer: Tokenizer, tmp_path: Path) -> None:
    index = HEADER.pack(MAGIC, 1, 8, 1, 2) + struct.pack("<iqqq", 3, 0, 0, 1)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(np.array([5, 6, tokenizer.eos_id], "<u2").tobytes())
    with pytest.raises(DataFault, match=r"megatron-core's datasets, which do not know the sources"):
        with_weights(open_corpus(str(tmp_path)), tokenizer, Web=0.5)
    run = read_run(open_corpus(str(tmp_path)), tokenizer, StreamConfig(L, num_lanes=1, seed=7), steps=1)
    assert set(itertools.chain(*run.samples.values())) == {5, 6, tokenizer.eos_id}
    assert set(tokens_by_source(run.state()["counters"])) == {NO_SOURCE}
